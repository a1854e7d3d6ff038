# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Imported last by a process that is to be forked: what it has is for ever.

Else a fork that looks for garbage touches, and so copies, all that torch has made.
"""

import gc

gc.collect()
gc.freeze()
