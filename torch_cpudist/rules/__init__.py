# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch optimizers read as update rules: groups, options, the parts of their state."""
