# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark cases; ``run(args)`` of each module yields one row per result."""
