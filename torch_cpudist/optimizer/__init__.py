# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``DistributedOptimizer`` and what belongs to its face; all engines register here."""

from torch_cpudist.drivers import (
    allreduce,
    asynchronous,
    geo,
    hybrid,
    local_sgd,
    reduce,
    sync,
)

__all__ = ["allreduce", "asynchronous", "geo", "hybrid", "local_sgd", "reduce", "sync"]
