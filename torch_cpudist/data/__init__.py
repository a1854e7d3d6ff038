# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Feeding training: batches whose rows are asked for ahead."""

from torch_cpudist.data.prefetch import prefetch

__all__ = ["prefetch"]
