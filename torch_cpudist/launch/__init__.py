# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who is who in a run: environment, roles, rendezvous, servers up, client connected."""
