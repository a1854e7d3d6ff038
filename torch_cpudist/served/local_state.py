# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer state of a trainer that steps by itself, and values that replace others.

Dense parameters have their state where torch keeps it; tables have it in
``LocalTable``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torch_cpudist.model.device import state_beside
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import state_exchange
from torch_cpudist.served.local import LocalParameterSet
from torch_cpudist.served.local_table import LocalTable

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run


def _by_weight(tables: Sequence[LocalTable]) -> dict[int, LocalTable]:
    return {id(table.placed.found.weight): table for table in tables}


def adopt(
    tables: Sequence[LocalTable], inners: Sequence[Optimizer], states: States
) -> None:
    """Puts state that came from elsewhere to where steps look for it.

    Args:
        tables: those that are stepped here; they have theirs already.
        inners: the wrapped optimizers.
        states: by parameter.
    """
    local = _by_weight(tables)
    for inner in inners:
        for parameter in state_exchange.indexed_parameters(inner):
            if id(parameter) in local:
                # torch's Adagrad makes state for every row when it is built.
                inner.state.pop(parameter, None)
            elif parameter in states and states[parameter] is not inner.state.get(
                parameter
            ):
                copied = copy.deepcopy(dict(states[parameter]))
                inner.state[parameter] = state_beside(inner, parameter, copied)


def collect(
    tables: Sequence[LocalTable], inners: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """Returns a ``state_dict`` for each wrapped optimizer."""
    local = _by_weight(tables)
    dicts = []
    for inner in inners:
        state: dict[int, Any] = {}
        for i, parameter in enumerate(state_exchange.indexed_parameters(inner)):
            if id(parameter) in local:
                saved = local[id(parameter)].saved()
                if saved is not None:
                    state[i] = saved
            elif parameter in inner.state:
                state[i] = inner.state[parameter]
        dicts.append(
            {"state": state, "param_groups": state_exchange.saved_groups(inner)}
        )
    return dicts


def give_back(tables: Sequence[LocalTable], inners: Sequence[Optimizer]) -> None:
    """Puts the state of tables where torch has it."""
    local = _by_weight(tables)
    for inner in inners:
        for parameter in state_exchange.indexed_parameters(inner):
            saved = local[id(parameter)].saved() if id(parameter) in local else None
            if saved is not None:
                inner.state[parameter] = saved


def put(
    run: Run,
    parameters: LocalParameterSet,
    inners: Sequence[Optimizer],
    states: States,
) -> None:
    """Takes loaded state, and makes trainer 0's weights everybody's."""
    for table in parameters.tables:
        table.load(states.get(table.placed.found.weight, {}))
    drop_and_adopt(parameters.tables, inners, states)
    _send_weights(run, parameters)


def drop_and_adopt(
    tables: Sequence[LocalTable], inners: Sequence[Optimizer], states: States
) -> None:
    """Replaces what torch keeps of the parameters in ``states`` by loaded state."""
    for inner in inners:
        for parameter in states:
            inner.state.pop(parameter, None)
    adopt(tables, inners, {p: s for p, s in states.items() if s})


def replace_weights(run: Run, parameters: LocalParameterSet, all_rows: bool) -> None:
    """Sends what was written; see ``DistributedOptimizer.store_model``."""
    state_exchange.check_before(run, parameters, all_rows)
    _send_weights(run, parameters)


@torch.no_grad()
def _send_weights(run: Run, parameters: LocalParameterSet) -> None:
    # The barrier leaves everyone's movement with the servers, but for what was written.
    changed = set(parameters.changed())
    kept = [(p, p.clone()) for name, p in parameters.trained() if name in changed]
    run.barrier()
    if run.trainer_rank == 0:
        parameters.pull_dense()
        parameters.pull_tables()
        for parameter, written in kept:
            parameter.copy_(written)
        state_exchange.store(parameters, {})
        # The next barrier must not hand on what is stored already.
        parameters.forget_movement()
    state_exchange.take_in(run, parameters)
    parameters.tables_current = True
