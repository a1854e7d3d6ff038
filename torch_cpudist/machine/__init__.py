# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""This host: its cores, addresses, files and devices; nothing of a run."""
