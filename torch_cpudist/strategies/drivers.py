# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which driver runs which strategy."""

from __future__ import annotations

from torch_cpudist.errors import InternalError
from torch_cpudist.parameter_set import ParameterSet
from torch_cpudist.strategies.async_driver import AsyncDriver
from torch_cpudist.strategies.asynchronous import Async
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.strategies.driver import Driver
from torch_cpudist.strategies.half_async import HalfAsync
from torch_cpudist.strategies.sync import Sync
from torch_cpudist.strategies.sync_driver import SyncDriver


def make_driver(strategy: Strategy, parameters: ParameterSet) -> Driver:
    """Makes what runs ``strategy`` for ``parameters``."""
    if isinstance(strategy, Async):
        return AsyncDriver(parameters, strategy)
    if isinstance(strategy, (Sync, HalfAsync)):
        return SyncDriver(parameters)
    raise InternalError(f"no driver for {type(strategy).__name__}")
