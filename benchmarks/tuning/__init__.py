# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Knobs of a machine: what is set around a process that trains, and not in it."""
