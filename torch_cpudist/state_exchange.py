# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Moves whole optimizers' state between servers and ``state_dict``s.

What one parameter's state looks like on a server stands in ``optimizer_state.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_cpudist import optimizer_state
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.parameter_set import ParameterSet
from torch_cpudist.placement import DenseParameter, PlacedTable

# torch's state of each parameter, by the parameter itself.
States = Mapping[torch.Tensor, Mapping[str, Any]]


def _indexed(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Lists parameters in the order in which a ``state_dict`` numbers them."""
    return [p for group in inner.param_groups for p in group["params"]]


def stepped_states(inners: Sequence[torch.optim.Optimizer]) -> States:
    """Collects the state of parameters that were updated before wrapping.

    Freshly built state (torch's Adagrad makes some) is what servers start with anyway.
    """
    return {
        parameter: state
        for inner in inners
        for parameter, state in inner.state.items()
        if int(state.get("step", 0) or 0) > 0
        or state.get("momentum_buffer") is not None
    }


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
        for i, parameter in enumerate(_indexed(inner)):
            entry = entries.get(id(parameter))
            if isinstance(entry, PlacedTable):
                state[i] = optimizer_state.fetch_table_state(
                    parameters, entry, configs[entry.group]
                )
            elif entry is not None:
                state[i] = optimizer_state.fetch_dense_state(
                    parameters, entry, configs[entry.group]
                )
        groups = inner.state_dict()["param_groups"]
        dicts.append({"state": state, "param_groups": groups})
    return dicts


def by_parameter(
    inners: Sequence[torch.optim.Optimizer], dicts: Sequence[Mapping[str, Any]]
) -> States:
    """Turns fetched ``state_dict``s into states by parameter."""
    states: dict[torch.Tensor, Mapping[str, Any]] = {}
    for inner, one in zip(inners, dicts, strict=True):
        indexed = _indexed(inner)
        states.update({indexed[i]: state for i, state in one["state"].items()})
    return states


def load_into_inners(
    inners: Sequence[torch.optim.Optimizer], dicts: Sequence[dict[str, Any]]
) -> States:
    """Sets the inner optimizers' hyper-parameters and takes their loaded state out.

    Raises:
        InvalidArgumentError: the number of optimizers differs.
    """
    if len(dicts) != len(inners):
        raise InvalidArgumentError(
            f"load_state_dict: state of {len(dicts)} optimizers, expected "
            f"{len(inners)}. Pass what state_dict() of the same optimizers returned."
        )
    states: dict[torch.Tensor, Mapping[str, Any]] = {}
    for inner, one in zip(inners, dicts, strict=True):
        groups = inner.param_groups
        parameters = [group["params"] for group in groups]
        inner.load_state_dict(one)
        states.update(inner.state)
        inner.state.clear()
        # Schedulers hold the dicts, so the loaded values go into the same ones.
        for old, kept, new in zip(groups, parameters, inner.param_groups, strict=True):
            old.clear()
            old.update({**new, "params": kept})
        inner.param_groups = groups
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
        optimizer_state.store_table_state(
            parameters,
            table,
            configs[table.group],
            states.get(weight, {}),
            weight.detach(),
        )
    for entry in parameters.placement.dense:
        optimizer_state.store_dense_state(
            parameters,
            entry,
            configs[entry.group],
            states.get(entry.parameter, {}),
            entry.parameter.detach(),
        )


@torch.no_grad()
def refresh(parameters: ParameterSet) -> None:
    """Pulls all values from the servers, but keeps those that others wrote here."""
    changed = set(parameters.changed())
    trained = parameters.trained()
    kept = {name: weight.clone() for name, weight in trained if name in changed}
    parameters.pull_dense()
    if any(t.found.name not in kept for t in parameters.placement.tables):
        parameters.pull_tables()
    for name, weight in trained:
        if name in kept:
            weight.copy_(kept[name])
