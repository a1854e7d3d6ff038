# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One engine per strategy: when to push, wait and take in; each registers itself."""

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
