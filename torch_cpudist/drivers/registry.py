# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which strategy is opened and driven by what: every driver's module registers itself.

``torch_cpudist.optimizer`` imports them all. Nothing here knows any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.optim import Optimizer

from torch_cpudist.collective.opening import tell_mismatch
from torch_cpudist.drivers.base import Driver, Wrapped
from torch_cpudist.errors import (
    ConfigMismatchError,
    ConfigurationError,
    InternalError,
    UnsupportedModelError,
)
from torch_cpudist.launch.run import Run
from torch_cpudist.model.placement import Placement
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import state_exchange
from torch_cpudist.served.base import Trained
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.tables.remote_weight import table_of

StrategyT = TypeVar("StrategyT", bound=Strategy)
TrainedT = TypeVar("TrainedT", bound=Trained)


@dataclass(frozen=True)
class Opening:
    """What parameters are opened with.

    Attributes:
        run: this trainer's.
        name: of the optimizer that is built, equal on all trainers.
        placement: tables, dense parameters and their layout.
        inners: the wrapped optimizers.
        states: torch's state of each parameter, from before.
    """

    run: Run
    name: str
    placement: Placement
    inners: Sequence[Optimizer]
    states: States


@dataclass(frozen=True)
class Engine:
    """How one class of strategies is run; see ``register``."""

    opens: Callable[[Any, Opening], Trained]
    drives: Callable[[Any, Any, Wrapped], Driver]
    served: bool
    parts: Callable[[Any], Sequence[Strategy]]
    check_device: Callable[[Any, Placement], None]
    waits: Callable[[Any], str]


_ENGINES: dict[type[Strategy], Engine] = {}


def _is_one(strategy: Strategy) -> Sequence[Strategy]:
    return (strategy,)


def _takes_device(strategy: Strategy, placement: Placement) -> None:
    """What ``Strategy.takes_devices`` says is all there is."""


def _waits_for_nobody(strategy: Strategy) -> str:
    return ""


def register(
    kind: type[StrategyT],
    *,
    opens: Callable[[StrategyT, Opening], TrainedT],
    drives: Callable[[StrategyT, TrainedT, Wrapped], Driver],
    served: bool = True,
    parts: Callable[[StrategyT], Sequence[Strategy]] = _is_one,
    check_device: Callable[[StrategyT, Placement], None] = _takes_device,
    waits: Callable[[StrategyT], str] = _waits_for_nobody,
) -> None:
    """Says how strategies of one class are run.

    Args:
        kind: the class.
        opens: opens what is trained, with trainer 0's values. Collective.
        drives: makes the driver of what ``opens`` returned.
        served: whether its steps wait for servers.
        parts: the strategies that it is made of.
        check_device: refuses a model that is not on the CPU, or nothing.
        waits: what is said to who trains another optimizer on servers beside it: such
            a strategy's rounds last several steps. Empty where there is no reason.
    """
    _ENGINES[kind] = Engine(opens, drives, served, parts, check_device, waits)


def engine_of(strategy: Strategy) -> Engine:
    """What runs ``strategy``."""
    found = _ENGINES.get(type(strategy))
    if found is None:
        raise InternalError(f"no driver for {type(strategy).__name__}")
    return found


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
        tell: called with the name of what is opened, before the others can go on.

    Raises:
        UnsupportedModelError: the strategy is not for a model with, or without, tables.
        BackendUnavailableError, ConfigurationError: it needs a group that is not there.
        ConfigMismatchError: another trainer built something else.
    """
    _check_beside(strategy, [other.strategy for other in run.participants()])
    check_device(strategy, placement)
    check_remote(strategy, placement)
    name = run.next_opening()
    tell(name)
    opening = Opening(run, name, placement, inners, states)
    try:
        return engine_of(strategy).opens(strategy, opening)
    except ConfigMismatchError as error:
        tell_mismatch(run, name, error)
        raise


def check_device(strategy: Strategy, placement: Placement) -> None:
    """Refuses a model on a device that a strategy does not train there.

    Raises:
        UnsupportedModelError: says where it is, and what to use.
    """
    if placement.device.type == "cpu":
        return
    engine = engine_of(strategy)
    for part in engine.parts(strategy):
        if not part.takes_devices:
            raise UnsupportedModelError(
                f"{type(part).__name__} trains models on CPUs, this one is on "
                f"{placement.device}. Use Sync, Async, HalfAsync, AllReduce, or "
                "Hybrid(dense=AllReduce(), sparse=Async()), or move it with "
                "model.cpu()."
            )
    engine.check_device(strategy, placement)


def check_remote(strategy: Strategy, placement: Placement) -> None:
    """Refuses remote tables under a strategy whose trainers hold whole tables.

    And tables whose rows servers do not make or take away, where trainers step rows.

    Raises:
        UnsupportedModelError: names one, and what to use.
    """
    if not strategy.of_tables.takes_rows_that_go:
        _check_rows_stay(strategy, placement)
    remote = [table.found.name for table in placement.tables if table.found.remote]
    if remote and not strategy.of_tables.takes_remote_tables:
        raise UnsupportedModelError(
            f"{type(strategy.of_tables).__name__} keeps every row of a table on every "
            f"trainer, and {remote[0]!r} is remote: its rows are on the servers only. "
            "Use Sync, HalfAsync, Async, Geo, or Hybrid(dense=AllReduce(), "
            "sparse=Async()); or build the model without remote tables."
        )


def _check_rows_stay(strategy: Strategy, placement: Placement) -> None:
    for table in placement.tables:
        opened = table_of(table.found.weight).open if table.found.remote else None
        if opened is None:
            continue
        options = {
            "admission": opened.admission,
            "eviction": opened.eviction,
            "max_rows": opened.max_rows,
            "unknown": None if opened.unknown == "initial" else opened.unknown,
        }
        given = [f"{key}={value!r}" for key, value in options.items() if value]
        if given:
            name = type(strategy.of_tables).__name__
            raise UnsupportedModelError(
                f"table {table.found.name!r} has {', '.join(given)}, and under {name} "
                "trainers step rows by themselves: what they have moved would be of "
                "rows that servers do not have, or have no more. Leave that out, or "
                "use Sync, HalfAsync, Async, or Hybrid(dense=AllReduce(), "
                "sparse=Async())."
            )


def _check_beside(strategy: Strategy, others: Sequence[Strategy]) -> None:
    """Refuses optimizers that would wait for each other's rounds.

    A round may last several steps, and a trainer has one request that changes a server
    under way at a time.
    """
    for other in others:
        both = [(engine_of(one), one) for one in (strategy, other)]
        reasons = [why for engine, one in both if (why := engine.waits(one))]
        if reasons and all(engine.served for engine, _ in both):
            raise ConfigurationError(reasons[0])


def make_driver(strategy: Strategy, parameters: Trained, made: Wrapped) -> Driver:
    """Makes what runs ``strategy``.

    Args:
        strategy: the strategy.
        parameters: from ``open_parameters``.
        made: what the driver works with.
    """
    state_exchange.forget_left(made.inners)
    return engine_of(strategy).drives(strategy, parameters, made)
