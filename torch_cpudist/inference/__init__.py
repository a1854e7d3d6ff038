# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models that leave the cluster: exporting them, and loading them where none is.

Users call ``exporting.export`` and ``loading.load_for_inference``, and what that
returns, a ``reader.Reader``. ``places`` and ``slots`` say where values go,
``shared_lock`` and ``forward_guard`` who waits for whom.
"""
