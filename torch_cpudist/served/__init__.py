# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parameters whose truth is on servers, and their optimizer state.

Both in the words of a snapshot's manifest (``described``), and loaded from one
(``loading``); ``row_counts`` is what servers say of rows that come and go.
"""
