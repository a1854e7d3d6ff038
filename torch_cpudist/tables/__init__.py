# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Embeddings whose rows live on servers, and how lookups bring rows in."""
