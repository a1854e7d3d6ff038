# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What runs which strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.collective.opening import ServerMark, tell_mismatch
from torch_cpudist.drivers.allreduce import AllReduceDriver
from torch_cpudist.drivers.asynchronous import AsyncDriver
from torch_cpudist.drivers.base import Driver
from torch_cpudist.drivers.geo import GeoDriver
from torch_cpudist.drivers.guard import InnerGuard
from torch_cpudist.drivers.hybrid import HybridDriver
from torch_cpudist.drivers.hybrid_parameters import ComposedParameters
from torch_cpudist.drivers.local_sgd import LocalSGDDriver
from torch_cpudist.drivers.reduce import ReduceDriver
from torch_cpudist.drivers.sync import SyncDriver
from torch_cpudist.errors import (
    ConfigMismatchError,
    ConfigurationError,
    Error,
    InternalError,
    UnsupportedModelError,
    UnsupportedOptimizerError,
)
from torch_cpudist.log import logger
from torch_cpudist.model.parts import dense_of, tables_of
from torch_cpudist.model.placement import Placement
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import local_state, state_exchange
from torch_cpudist.served.base import Trained
from torch_cpudist.served.local import LocalParameterSet
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.settings.fields import Sharding
from torch_cpudist.settings.replicas import Replicas
from torch_cpudist.strategies.allreduce import AllReduce
from torch_cpudist.strategies.asynchronous import Async
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.strategies.geo import Geo
from torch_cpudist.strategies.half_async import HalfAsync
from torch_cpudist.strategies.hybrid import Hybrid
from torch_cpudist.strategies.local_sgd import LocalSGD
from torch_cpudist.strategies.reduce import Reduce
from torch_cpudist.strategies.sync import Sync

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

_AMONG_TRAINERS = (AllReduce, Reduce, LocalSGD)


def open_parameters(
    strategy: Strategy,
    run: Run,
    placement: Placement,
    inners: Sequence[Optimizer],
    states: States,
    tell: Callable[[str], None],
) -> Trained:
    """Opens what ``strategy`` trains, with trainer 0's values. Collective.

    Args:
        strategy: the strategy.
        run: this trainer's.
        placement: tables, dense parameters and their layout.
        inners: the wrapped optimizers.
        states: torch's state of each parameter, from before.
        tell: called with the name of the opening, before anything is opened.

    Raises:
        UnsupportedModelError: the strategy is not for a model with, or without, tables.
        BackendUnavailableError, ConfigurationError: it needs a group that is not there.
        ConfigMismatchError: another trainer built something else.
    """
    _check_beside(strategy, run)
    _check_device(strategy, placement)
    opening = run.next_opening()
    tell(opening)
    try:
        return _open(strategy, run, placement, inners, states, opening)
    except ConfigMismatchError as error:
        tell_mismatch(run, opening, error)
        raise


def _open(
    strategy: Strategy,
    run: Run,
    placement: Placement,
    inners: Sequence[Optimizer],
    states: States,
    opening: str,
) -> Trained:
    if isinstance(strategy, Hybrid):
        _check_parts(placement)
        trainers = run.trainers()
        tables = tables_of(placement, strategy.sparse.updates(trainers))
        dense = dense_of(placement, strategy.dense.updates(trainers))
        opened = _open_set(strategy.sparse, run, tables, states)
        try:
            part = strategy.dense_part
            rest = _open(part, run, dense, inners, states, opening)
        except BaseException:
            # The model keeps none of this.
            with contextlib.suppress(Error):
                opened.close(tell_servers=True)
            raise
        return ComposedParameters(placement, opened, rest)
    if isinstance(strategy, _AMONG_TRAINERS):
        kind = type(strategy).__name__
        if strategy.sharding != Sharding() and not isinstance(strategy, Reduce):
            logger.warning("%s: sharding has no effect, no server has a block", kind)
        _check_tables(placement, strategy)
        client = run.trainer_client()
        # Before a group is made, for which trainers of another strategy do not come.
        mark = None if run.environment.group else ServerMark(run, opening)
        try:
            group = CollectiveGroup(run, kind, placement.device)
            said = repr(dataclasses.replace(strategy, replicas=Replicas()))
            return CopiedParameters(client, placement, group, inners, said, mark)
        except BaseException:
            if mark is not None:
                with contextlib.suppress(Error):
                    mark.close(tell_servers=True)
            raise
    return _open_set(strategy, run, placement, states)


# Rules that torch itself runs on sparse gradients.
_TAKE_ROWS = ("adagrad", "ftrl", "row_wise_adagrad", "sgd", "sparse_adam")


def _check_tables(placement: Placement, strategy: Strategy) -> None:
    """Refuses tables that trainers cannot keep equal by themselves."""
    kind = type(strategy).__name__
    for table in placement.tables:
        rule = placement.rules[table.group]
        where = f"table {table.found.name!r} under {kind}"
        remedy = (
            f"Train tables by servers, the rest as now: Hybrid(dense={kind}(...), "
            "sparse=Sync()), Async() or Geo(). Or set sparse=False on the embedding."
        )
        if isinstance(strategy, LocalSGD):
            raise UnsupportedModelError(
                f"{where}, which averages whole parameters. {remedy}"
            )
        lazy = rule is None or rule.momentum or rule.weight_decay
        if rule is None or rule.kind not in _TAKE_ROWS or lazy:
            raise UnsupportedOptimizerError(
                f"{where}, where torch updates it, which does not run {rule} on sparse "
                f"gradients. Use plain SGD, Adagrad or SparseAdam for it. {remedy}"
            )


def _check_device(strategy: Strategy, placement: Placement) -> None:
    """Refuses a model on a device that a strategy does not train there."""
    device = placement.device
    if device.type == "cpu":
        return
    parts = [strategy]
    if isinstance(strategy, Hybrid):
        parts = [strategy.dense, strategy.sparse]
    for part in parts:
        kind = type(part).__name__
        if not part.takes_devices:
            raise UnsupportedModelError(
                f"{kind} trains models on CPUs, this one is on {device}. Use Sync, "
                "Async, HalfAsync, AllReduce, or Hybrid(dense=AllReduce(), "
                "sparse=Async()), or move it with model.cpu()."
            )
    if isinstance(strategy, AllReduce) and placement.tables:
        name = placement.tables[0].found.name
        raise UnsupportedModelError(
            f"table {name!r} under AllReduce on {device}: trainers exchange rows of "
            "tables on CPUs. Keep tables on servers: "
            "Hybrid(dense=AllReduce(), sparse=Sync()). Or set sparse=False on the "
            "embedding."
        )


def _outer_of(strategy: Strategy) -> object:
    part = strategy.sparse if isinstance(strategy, Hybrid) else strategy
    return getattr(part, "outer", None)


def _check_beside(strategy: Strategy, run: Run) -> None:
    """Refuses optimizers that would wait for each other's rounds.

    An outer step is a round that lasts several steps, and a trainer has one request
    that changes a server under way at a time.
    """
    for other in run.participants():
        both = (strategy, other.strategy)
        served = not any(isinstance(one, _AMONG_TRAINERS) for one in both)
        if served and any(_outer_of(one) is not None for one in both):
            raise ConfigurationError(
                "Geo(outer=...) waits for steps of the other trainers, which another "
                "optimizer on servers would wait for. Train both by one optimizer, or "
                "without outer, or close() the other one first."
            )


def _check_parts(placement: Placement) -> None:
    if not placement.tables:
        raise UnsupportedModelError(
            "Hybrid trains tables and dense parameters, found no table: no "
            "nn.Embedding or nn.EmbeddingBag with sparse=True "
            "(cpudist.shard_tables sets it). Use the dense part's strategy alone."
        )
    if not placement.dense:
        raise UnsupportedModelError(
            "Hybrid trains tables and dense parameters, found tables only. Use the "
            "sparse part's strategy alone."
        )


def _open_set(
    strategy: Strategy, run: Run, placement: Placement, states: States
) -> ParameterSet:
    client = run.trainer_client()
    # Where the optimizer runs here, its state stays here.
    sent = {} if strategy.local else states
    store: Callable[[ParameterSet], None] | None = None
    if run.trainer_rank == 0:
        store = functools.partial(state_exchange.store, states=sent)
    if not strategy.local:
        return ParameterSet(client, placement, store)
    alone = (
        run.trainer_count == 1
        and run.environment.group is None
        and getattr(strategy, "outer", None) is None
    )
    cap_bytes = run.environment.server.memory_cap_bytes
    return LocalParameterSet(client, placement, store, states, alone, cap_bytes)


def make_driver(
    strategy: Strategy,
    parameters: Trained,
    inners: Sequence[Optimizer],
    guard: InnerGuard,
    states: States,
    others: Sequence[torch.Tensor] = (),
) -> Driver:
    """Makes what runs ``strategy``.

    Args:
        strategy: the strategy.
        parameters: from ``open_parameters``.
        inners: the wrapped optimizers.
        guard: keeps others from stepping them.
        states: of their parameters, from before.
        others: parameters of theirs that another driver steps.
    """
    state_exchange.forget_left(inners)
    if isinstance(strategy, Hybrid) and isinstance(parameters, ComposedParameters):
        if isinstance(parameters.tables, LocalParameterSet):
            local_state.adopt(parameters.tables.tables, inners, {})
        weights = [table.found.weight for table in parameters.placement.tables]
        dense = parameters.dense
        return HybridDriver(
            parameters,
            # Tables are stepped without torch's optimizers.
            make_driver(strategy.sparse, parameters.tables, [], guard, states),
            make_driver(strategy.dense_part, dense, inners, guard, states, weights),
        )
    if isinstance(parameters, CopiedParameters):
        if isinstance(strategy, AllReduce):
            return AllReduceDriver(parameters, strategy, guard, states, others)
        if isinstance(strategy, Reduce):
            return ReduceDriver(parameters, strategy, guard, states, others)
        if isinstance(strategy, LocalSGD):
            return LocalSGDDriver(parameters, strategy, guard, states, others)
    if isinstance(strategy, Geo) and isinstance(parameters, LocalParameterSet):
        return GeoDriver(parameters, strategy, inners, guard, states)
    if isinstance(parameters, ParameterSet):
        if isinstance(strategy, Async):
            return AsyncDriver(parameters, strategy)
        if isinstance(strategy, (Sync, HalfAsync)):
            return SyncDriver(parameters)
    raise InternalError(f"no driver for {type(strategy).__name__}")
