# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of a run: resuming from the newest, marking cuts, what a trainer adds."""
