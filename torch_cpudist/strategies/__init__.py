# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Strategies, by name: settings only, which anybody may read."""

from torch_cpudist.strategies.allreduce import AllReduce
from torch_cpudist.strategies.asynchronous import Async
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.strategies.geo import Geo
from torch_cpudist.strategies.half_async import HalfAsync
from torch_cpudist.strategies.hybrid import Hybrid
from torch_cpudist.strategies.local_sgd import LocalSGD
from torch_cpudist.strategies.reduce import Reduce
from torch_cpudist.strategies.registry import names, resolve, strategy
from torch_cpudist.strategies.sync import Sync

__all__ = [
    "AllReduce",
    "Async",
    "Geo",
    "HalfAsync",
    "Hybrid",
    "LocalSGD",
    "Reduce",
    "Strategy",
    "Sync",
    "names",
    "resolve",
    "strategy",
]
