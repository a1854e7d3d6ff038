# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Cases of snapshots: their saves, and what trainers notice of them."""
