# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer state of a trainer that steps by itself, and values that replace others.

Dense parameters have their state where torch keeps it; tables have it in
``LocalTable``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torch_cpudist import state_exchange
from torch_cpudist.local_parameters import LocalParameterSet, LocalTable
from torch_cpudist.state_checks import States

if TYPE_CHECKING:
    from torch_cpudist.context import Context


def _tables(parameters: LocalParameterSet) -> dict[int, LocalTable]:
    return {id(table.placed.found.weight): table for table in parameters.tables}


def adopt(
    parameters: LocalParameterSet, inners: Sequence[Optimizer], states: States
) -> None:
    """Puts state that came from elsewhere to where steps look for it.

    Args:
        parameters: the open set; its tables have theirs already.
        inners: the wrapped optimizers.
        states: by parameter.
    """
    tables = _tables(parameters)
    for inner in inners:
        for parameter in state_exchange.indexed_parameters(inner):
            if id(parameter) in tables:
                # torch's Adagrad makes state for every row when it is built.
                inner.state.pop(parameter, None)
            elif parameter in states and states[parameter] is not inner.state.get(
                parameter
            ):
                inner.state[parameter] = copy.deepcopy(dict(states[parameter]))


def collect(
    parameters: LocalParameterSet, inners: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """Returns a ``state_dict`` for each wrapped optimizer."""
    tables = _tables(parameters)
    dicts = []
    for inner in inners:
        state: dict[int, Any] = {}
        for i, parameter in enumerate(state_exchange.indexed_parameters(inner)):
            if id(parameter) in tables:
                state[i] = tables[id(parameter)].saved()
            elif parameter in inner.state:
                state[i] = inner.state[parameter]
        dicts.append(
            {"state": state, "param_groups": state_exchange.saved_groups(inner)}
        )
    return dicts


def give_back(parameters: LocalParameterSet, inners: Sequence[Optimizer]) -> None:
    """Puts the state of tables where torch has it."""
    tables = _tables(parameters)
    for inner in inners:
        for parameter in state_exchange.indexed_parameters(inner):
            if id(parameter) in tables:
                inner.state[parameter] = tables[id(parameter)].saved()


def replace(
    context: Context,
    parameters: LocalParameterSet,
    inners: Sequence[Optimizer],
    state_dict: Any,
) -> None:
    """Loads a ``state_dict``; see ``DistributedOptimizer.load_state_dict``."""
    state_exchange.check_before(context, parameters, all_rows=False)
    several = isinstance(state_dict, Mapping) and "optimizers" in state_dict
    dicts = state_dict["optimizers"] if several else [state_dict]
    states = state_exchange.load_into_inners(parameters, inners, dicts)
    for table in parameters.tables:
        table.load(states.get(table.placed.found.weight, {}))
    for inner in inners:
        for parameter in state_exchange.indexed_parameters(inner):
            inner.state.pop(parameter, None)
    adopt(parameters, inners, {p: s for p, s in states.items() if s})
    _send_weights(context, parameters)


def replace_weights(
    context: Context, parameters: LocalParameterSet, all_rows: bool
) -> None:
    """Sends what was written; see ``DistributedOptimizer.store_model``."""
    state_exchange.check_before(context, parameters, all_rows)
    _send_weights(context, parameters)


@torch.no_grad()
def _send_weights(context: Context, parameters: LocalParameterSet) -> None:
    # The barrier leaves everyone's movement with the servers, but for what was written.
    changed = set(parameters.changed())
    kept = [(p, p.clone()) for name, p in parameters.trained() if name in changed]
    context.barrier()
    if context.trainer_rank == 0:
        parameters.pull_dense()
        parameters.pull_tables()
        for parameter, written in kept:
            parameter.copy_(written)
        state_exchange.store(parameters, {})
        # The next barrier must not hand on what is stored already.
        parameters.forget_movement()
    state_exchange.take_in(context, parameters)
    parameters.tables_current = True
