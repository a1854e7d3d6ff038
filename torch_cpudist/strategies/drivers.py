# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What runs which strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from torch_cpudist.errors import InternalError
from torch_cpudist.inner_guard import InnerGuard
from torch_cpudist.local_parameters import LocalParameterSet
from torch_cpudist.parameter_set import ParameterSet
from torch_cpudist.placement import Placement
from torch_cpudist.state_checks import States
from torch_cpudist.strategies.async_driver import AsyncDriver
from torch_cpudist.strategies.asynchronous import Async
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.strategies.driver import Driver
from torch_cpudist.strategies.geo import Geo
from torch_cpudist.strategies.geo_driver import GeoDriver
from torch_cpudist.strategies.half_async import HalfAsync
from torch_cpudist.strategies.sync import Sync
from torch_cpudist.strategies.sync_driver import SyncDriver

if TYPE_CHECKING:
    from torch_cpudist.context import Context


def open_parameters(
    strategy: Strategy,
    context: Context,
    placement: Placement,
    store: Callable[[ParameterSet], None] | None,
    states: States,
) -> ParameterSet:
    """Opens what ``strategy`` trains; see ``ParameterSet``.

    Args:
        strategy: the strategy.
        context: this trainer's.
        placement: tables, dense parameters and their layout.
        store: sends the initial values once the set is open; on trainer 0 only.
        states: torch's state of each parameter, from before.
    """
    client = context.trainer_client()
    if not strategy.local:
        return ParameterSet(client, placement, store)
    alone = (
        context.trainer_count == 1
        and context.environment.group is None
        and getattr(strategy, "outer", None) is None
    )
    return LocalParameterSet(client, placement, store, states, alone)


def make_driver(
    strategy: Strategy,
    parameters: ParameterSet,
    inners: Sequence[Optimizer],
    guard: InnerGuard,
    states: States,
) -> Driver:
    """Makes what runs ``strategy``.

    Args:
        strategy: the strategy.
        parameters: from ``open_parameters``.
        inners: the wrapped optimizers.
        guard: keeps others from stepping them.
        states: of their parameters, from before.
    """
    if isinstance(strategy, Geo) and isinstance(parameters, LocalParameterSet):
        return GeoDriver(parameters, strategy, inners, guard, states)
    if isinstance(strategy, Async):
        return AsyncDriver(parameters, strategy)
    if isinstance(strategy, (Sync, HalfAsync)):
        return SyncDriver(parameters)
    raise InternalError(f"no driver for {type(strategy).__name__}")
