# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``DistributedOptimizer`` and what belongs to its face; all engines register here.

``phases`` times forward, backward and step; ``outliving`` goes on with servers that
have come back, or that had lost this trainer.
"""

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
