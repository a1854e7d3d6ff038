# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loops over datasets, what they report, and rows asked for ahead."""
