# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Replicas: threads of one process that train one model, each on a part of a batch."""

from torch_cpudist.replicas.executor import ReplicaExecutor

__all__ = ["ReplicaExecutor"]
