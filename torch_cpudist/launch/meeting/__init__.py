# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where jobs of servers and of trainers meet: words that server 0 keeps for them.

``board`` has the words, ``point`` shows them at a port, ``visitor`` is one who asks
there, ``store`` asks; ``frames`` and ``proof`` are what both say to each other, and
``run_word`` what servers say of their run.
"""
