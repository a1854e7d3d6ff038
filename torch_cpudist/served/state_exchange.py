# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Moves whole optimizers' state between servers and ``state_dict``s.

What one parameter's state looks like on a server stands in ``state_layout.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from torch_cpudist.errors import ModelChangedError
from torch_cpudist.log import logger
from torch_cpudist.model.placement import DenseParameter, PlacedTable
from torch_cpudist.rules.state_parts import (
    States,
    check_dicts,
    check_states,
    state_parts,
)
from torch_cpudist.served import state_layout
from torch_cpudist.served.base import Trained
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.tables.remote_weight import is_remote, table_of
from torch_cpudist.tables.weight import values_of

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

# Optimizers whose state went with the servers, and what they held themselves then.
_left_behind: WeakKeyDictionary[torch.optim.Optimizer, object] = WeakKeyDictionary()


def indexed_parameters(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Lists parameters in the order in which a ``state_dict`` numbers them."""
    return [p for group in inner.param_groups for p in group["params"]]


def has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether torch's state of a parameter is of an update that was made."""
    counted = int(state.get("step", 0) or 0) > 0
    return counted or state.get("momentum_buffer") is not None


def stepped_states(inners: Sequence[torch.optim.Optimizer]) -> States:
    """Collects the state of parameters that were updated before wrapping.

    Freshly built state (torch's Adagrad makes some) is what servers start with anyway.
    """
    return {
        parameter: state
        for inner in inners
        for parameter, state in inner.state.items()
        if has_stepped(state)
    }


def note_lost(
    parameters: ParameterSet, inners: Sequence[torch.optim.Optimizer]
) -> None:
    """Remembers optimizers whose state stays behind on servers that are left."""
    if any(state_parts(config) for config in parameters.placement.layout.configs):
        note_left(inners)


def note_left(inners: Sequence[torch.optim.Optimizer]) -> None:
    """Remembers optimizers whose state is not with them any more."""
    for inner in inners:
        _left_behind[inner] = inner.state


def forget_left(inners: Sequence[torch.optim.Optimizer]) -> None:
    """Forgets it of optimizers that are wrapped again: that was said, if at all."""
    for inner in inners:
        _left_behind.pop(inner, None)


def warn_of_lost(inners: Sequence[torch.optim.Optimizer]) -> None:
    """Warns of optimizers that begin anew without the state they had on servers."""
    for inner in inners:
        # Loading puts another dict in its place.
        if inner in _left_behind and _left_behind.pop(inner) is inner.state:
            logger.warning(
                "%s was wrapped before, and its state went with shutdown() or close(): "
                "it begins with the state that it had before that. Save "
                "opt.state_dict() before and pass it to opt.load_state_dict().",
                type(inner).__name__,
            )


def fetch(
    parameters: ParameterSet, inners: Sequence[torch.optim.Optimizer]
) -> list[dict[str, Any]]:
    """Fetches a ``state_dict`` for each inner optimizer from the servers."""
    placement = parameters.placement
    # State has the shape with which the servers were opened, whatever was set since.
    configs = placement.layout.configs
    entries: dict[int, PlacedTable | DenseParameter] = {}
    entries.update({id(table.found.weight): table for table in placement.tables})
    entries.update({id(entry.parameter): entry for entry in placement.dense})
    dicts = []
    for inner in inners:
        state = {}
        for i, parameter in enumerate(indexed_parameters(inner)):
            entry = entries.get(id(parameter))
            if isinstance(entry, PlacedTable):
                if entry.found.remote:
                    continue  # nobody here knows which rows there are
                state[i] = state_layout.fetch_table_state(
                    parameters, entry, configs[entry.group]
                )
            elif entry is not None:
                state[i] = state_layout.fetch_dense_state(
                    parameters, entry, configs[entry.group]
                )
        dicts.append({"state": state, "param_groups": saved_groups(inner)})
    return dicts


def saved_groups(inner: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Parameter groups as torch saves them: numbers instead of parameters."""
    groups, first = [], 0
    for group in inner.param_groups:
        last = first + len(group["params"])
        groups.append({**group, "params": list(range(first, last))})
        first = last
    return groups


def by_parameter(
    inners: Sequence[torch.optim.Optimizer], dicts: Sequence[Mapping[str, Any]]
) -> States:
    """Turns fetched ``state_dict``s into states by parameter."""
    states: dict[torch.Tensor, Mapping[str, Any]] = {}
    for inner, one in zip(inners, dicts, strict=True):
        indexed = indexed_parameters(inner)
        states.update({indexed[i]: state for i, state in one["state"].items()})
    return states


def load_into_inners(
    parameters: Trained,
    inners: Sequence[torch.optim.Optimizer],
    dicts: Sequence[Mapping[str, Any]],
) -> States:
    """Sets the inner optimizers' hyper-parameters and takes the state out.

    All is checked before anything is changed.

    Returns:
        State by parameter.

    Raises:
        InvalidArgumentError: it belongs to other optimizers or another model.
        UnsupportedOptimizerError: an option has a value the servers do not honour.
    """
    check_dicts(inners, dicts, parameters.placement.rules)
    states: dict[torch.Tensor, Mapping[str, Any]] = {}
    for inner, one in zip(inners, dicts, strict=True):
        for group, saved in zip(inner.param_groups, one["param_groups"], strict=True):
            for index, parameter in zip(saved["params"], group["params"], strict=True):
                states[parameter] = one["state"].get(index, {})
    check_states(parameters.placement, states, whole=True)
    for inner, one in zip(inners, dicts, strict=True):
        for group, saved in zip(inner.param_groups, one["param_groups"], strict=True):
            # Schedulers hold the dicts, so the loaded values go into the same ones.
            kept = ("params", "param_names")
            options = {k: v for k, v in saved.items() if k not in kept}
            group.update(copy.deepcopy(options))
    return states


def store(parameters: ParameterSet, states: States) -> None:
    """Sends every parameter's values and state from this trainer to the servers.

    Args:
        parameters: the parameter set; tables must hold all their rows.
        states: state by parameter; where there is none, the rule's initial state.
    """
    configs = parameters.placement.layout.configs
    for table in parameters.placement.tables:
        weight = table.found.weight
        if is_remote(weight):
            _store_rows(parameters, table)
            continue
        state_layout.store_table_state(
            parameters,
            table,
            configs[table.group],
            states.get(weight, {}),
            values_of(weight),
        )
    for entry in parameters.placement.dense:
        state_layout.store_dense_state(
            parameters,
            entry,
            configs[entry.group],
            states.get(entry.parameter, {}),
            entry.parameter.detach(),
        )
    parameters.tables_current = True


def _store_rows(parameters: ParameterSet, table: PlacedTable) -> None:
    """Sends the rows with which a remote table begins, if they are here."""
    values = table_of(table.found.weight).values
    if values is not None:
        config = parameters.placement.layout.configs[table.group]
        state_layout.store_table_state(parameters, table, config, {}, values)


def check_written(parameters: Trained) -> None:
    """Refuses tables that were written while some of their rows were stale here.

    Raises:
        ModelChangedError: rows that nobody wrote would take the servers' rows back to
            an earlier step.
    """
    changed = set(parameters.changed())
    tables = [table.found.name for table in parameters.placement.tables]
    written = [name for name in tables if name in changed]
    if written and not parameters.tables_current:
        raise ModelChangedError(
            f"table {written[0]!r} was written after a step, when rows that were not "
            "looked up since are of an earlier step here; sending it would undo what "
            "they learned. Nothing was sent. Call opt.flush() before writing to a "
            "table. If all its rows were written (model.load_state_dict), call "
            "opt.store_model(all_rows=True) on every trainer."
        )


@torch.no_grad()
def refresh(parameters: Trained, all_rows: bool = False) -> None:
    """Pulls all values from the servers, but keeps those that others wrote here.

    Args:
        parameters: the parameter set.
        all_rows: written tables are kept even if rows were stale when written.

    Raises:
        ModelChangedError: see ``check_written``; no value was changed.
    """
    if not all_rows:
        check_written(parameters)
    changed = set(parameters.changed())
    trained = parameters.trained()
    kept = {name: weight.clone() for name, weight in trained if name in changed}
    parameters.pull_dense()
    if any(t.found.name not in kept for t in parameters.placement.tables):
        parameters.pull_tables()
    for name, weight in trained:
        if name in kept:
            weight.copy_(kept[name])


def loaded_states(
    run: Run,
    parameters: Trained,
    inners: Sequence[torch.optim.Optimizer],
    state_dict: Any,
) -> States:
    """Checks a ``state_dict``, sets its hyper-parameters and takes its state out.

    See ``DistributedOptimizer.load_state_dict`` and ``load_into_inners``.
    """
    check_before(run, parameters, all_rows=False)
    several = isinstance(state_dict, Mapping) and "optimizers" in state_dict
    dicts = state_dict["optimizers"] if several else [state_dict]
    return load_into_inners(parameters, inners, dicts)


def put(run: Run, parameters: ParameterSet, states: States) -> None:
    """Makes trainer 0's weights, and loaded state, those of the servers. Collective."""
    run.barrier()
    if run.trainer_rank == 0:
        refresh(parameters)
        store(parameters, states)
    take_in(run, parameters)


def replace_weights(
    run: Run,
    parameters: ParameterSet,
    inners: Sequence[torch.optim.Optimizer],
    all_rows: bool,
) -> None:
    """Sends what was written; see ``DistributedOptimizer.store_model``."""
    check_before(run, parameters, all_rows)
    run.barrier()
    if run.trainer_rank == 0:
        states = by_parameter(inners, fetch(parameters, inners))
        refresh(parameters, all_rows)
        store(parameters, states)
    take_in(run, parameters)


def check_before(run: Run, parameters: Trained, all_rows: bool) -> None:
    """Checks what trainer 0 is about to send.

    After the first barrier a refusal would leave the others waiting in the second.

    Raises:
        ModelChangedError: see ``check_written``.
    """
    parameters.check_kept()
    if run.trainer_rank == 0 and not all_rows:
        check_written(parameters)


def take_in(run: Run, parameters: ParameterSet) -> None:
    """Waits until trainer 0 has sent its values, and takes them in."""
    run.barrier()
    parameters.tables_current = run.trainer_rank == 0
    parameters.accept_changes()
    parameters.join()
