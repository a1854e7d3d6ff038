# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a rank does, for Prometheus: ``CPUDIST_METRICS``; docs/monitoring.md.

Nothing here counts. Counters are those of the client, the server and the optimizers,
which the training loop has anyway; they are read when somebody asks, in a thread of
this folder, and what is read waits for no peer.
"""
