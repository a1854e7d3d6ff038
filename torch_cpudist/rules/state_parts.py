# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the state of each rule consists of, and whether state from elsewhere fits.

The core reads state by the size of its parameter, so nothing goes there unchecked. A
``state_dict`` is checked as a whole before anything is changed or sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_cpudist import _core
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.model.placement import Placement, Rules
from torch_cpudist.rules.read import (
    DECOUPLED,
    known_options,
    read_group,
    required_options,
)
from torch_cpudist.tables.remote_weight import is_remote

# torch's state of each parameter, by the parameter itself.
States = Mapping[torch.Tensor, Mapping[str, Any]]

# Updates of each row, for rules that run lazily with a step count per row. torch
# ignores it.
ROW_STEP = "cpudist_row_step"


@dataclass(frozen=True)
class StatePart:
    """One tensor of a rule's state: its name in torch, and whether one per row."""

    name: str
    per_row: bool = False


def state_parts(config: _core.OptimizerConfig) -> list[StatePart]:
    """Returns the parts of a rule's state in the servers' order."""
    kind = config.kind
    if kind == "sgd":
        return [StatePart("momentum_buffer")] if config.momentum else []
    if kind == "adagrad":
        return [StatePart("sum")]
    if kind == "row_wise_adagrad":
        return [StatePart("sum", per_row=True)]
    if kind == "rmsprop":
        parts = [StatePart("square_avg")]
        return [*parts, StatePart("momentum_buffer")] if config.momentum else parts
    if kind == "ftrl":
        return [StatePart("z"), StatePart("n")]
    return [StatePart("exp_avg"), StatePart("exp_avg_sq")]


def part_shape(part: StatePart, shape: Sequence[int]) -> torch.Size:
    """The shape of one part of the state of a parameter, as in torch."""
    return torch.Size([shape[0] if shape else 1] if part.per_row else shape)


def _is_count(value: Any) -> bool:
    """Whether a step is one number, whole and >= 0, of any of torch's kinds."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return False
        value = value.item()
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and math.isfinite(value) and 0 <= value < 2**53 and value == int(value)


def _refuse_state(name: str, expected: str, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"optimizer state of {name!r}: expected {expected}, found {found}. Load the "
        "state of the same optimizer over the same model."
    )


def _check_shape(name: str, what: str, value: Any, shape: Sequence[int]) -> None:
    expected = f"{what} to be a tensor of shape {tuple(shape)}"
    if not isinstance(value, torch.Tensor):
        raise _refuse_state(name, expected, type(value).__name__)
    if value.shape != torch.Size(shape):
        raise _refuse_state(name, expected, f"shape {tuple(value.shape)}")
    if value.is_complex() or value.dtype == torch.bool:
        raise _refuse_state(name, f"{what} of real numbers", str(value.dtype))


def check_state(
    name: str,
    shape: Sequence[int],
    config: _core.OptimizerConfig,
    state: Mapping[str, Any],
) -> bool:
    """Checks that state fits a parameter, whose memory the core reads by size.

    Args:
        name: the parameter's name, for messages.
        shape: the parameter's.
        config: its rule.
        state: torch's state of this parameter; empty means initial. What the rule does
            not keep is ignored, as torch does after an option was switched off.

    Returns:
        Whether state is there; all parts or none must be.

    Raises:
        InvalidArgumentError: a part is missing or of another shape.
    """
    given = {key: value for key, value in state.items() if value is not None}
    parts = state_parts(config)
    known = [part.name for part in parts]
    for part in parts:
        if part.name in given:
            _check_shape(name, part.name, given[part.name], part_shape(part, shape))
    if "step" in given and not _is_count(given["step"]):
        raise _refuse_state(name, "step to be a whole number", repr(given["step"]))
    if ROW_STEP in given:
        _check_shape(name, ROW_STEP, given[ROW_STEP], shape[:1])
        counts = given[ROW_STEP].to(torch.float64)
        if not bool(((counts >= 0) & (counts < 2**31)).all()):
            raise _refuse_state(
                name, f"{ROW_STEP} from 0 to 2**31 - 1", "numbers outside"
            )
    needed = known if config.kind == "sgd" else [*known, "step"]
    missing = [part for part in needed if part not in given]
    begun = any(part in given for part in known) or int(given.get("step", 0)) > 0
    if known and begun and missing:
        raise _refuse_state(name, f"{needed} of {config.kind}", f"no {missing}")
    return bool(known) and begun


def _is_begun(state: Mapping[str, Any]) -> bool:
    """Whether state of a parameter is of an update that was made."""
    counted = int(state.get("step", 0) or 0) > 0
    return counted or state.get("momentum_buffer") is not None


def check_states(placement: Placement, states: States, whole: bool = False) -> None:
    """Checks the state of every parameter that is placed.

    Args:
        placement: what the servers hold.
        states: state by parameter.
        whole: state that a rule does not keep is refused.

    Raises:
        InvalidArgumentError: state does not fit its parameter.
    """
    rules = placement.rules
    placed = [
        (t.found.name, t.found.weight, t.found.weight.shape, rules[t.group])
        for t in placement.tables
    ]
    placed += [(d.name, d.parameter, d.shape, rules[d.group]) for d in placement.dense]
    for name, parameter, shape, config in placed:
        if config is None:  # torch's optimizer keeps it and knows what it needs
            continue
        state = states.get(parameter, {})
        if is_remote(parameter) and _is_begun(state):
            raise InvalidArgumentError(
                f"state of remote table {name!r}: its rows and their state are on the "
                "servers only, so that none can be loaded. Leave it out of the "
                "state_dict (that of a DistributedOptimizer does), or train the table "
                "as a static one."
            )
        check_state(name, shape, config, state)
        known = {part.name for part in state_parts(config)}
        others = [key for key in state if key not in {*known, "step", ROW_STEP}]
        lost = sorted(str(key) for key in others if state[key] is not None)
        if whole and lost:
            kept = sorted(known) or "no state"
            raise _refuse_state(name, f"{kept} of {config.kind}", f"also {lost}")


def _refuse_dict(
    inner: torch.optim.Optimizer, expected: str, found: str
) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"load_state_dict of {type(inner).__name__}: expected {expected}, found "
        f"{found}. Nothing was changed. Pass what state_dict() of the same optimizer "
        "over the same model returned."
    )


def _check_form(inner: torch.optim.Optimizer, saved: Any) -> None:
    """Checks that a ``state_dict`` has torch's form, and as many parameters."""
    form = "a dict with 'state' and 'param_groups'"
    if not isinstance(saved, Mapping):
        raise _refuse_dict(inner, form, type(saved).__name__)
    if not {"state", "param_groups"} <= saved.keys():
        raise _refuse_dict(inner, form, f"keys {[str(key) for key in saved]}")
    state, groups = saved["state"], saved["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, Sequence):
        found = f"{type(state).__name__} and {type(groups).__name__}"
        raise _refuse_dict(inner, "a dict 'state' and a list 'param_groups'", found)
    sizes = [len(group["params"]) for group in inner.param_groups]
    if not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise _refuse_dict(inner, "'params' in every group", "a group without")
    found_sizes = [len(group["params"]) for group in groups]
    if found_sizes != sizes:
        raise _refuse_dict(
            inner, f"groups of {sizes} parameters", f"groups of {found_sizes}"
        )
    indices = {index for group in groups for index in group["params"]}
    stray = [key for key in state if key not in indices]
    if stray or not all(isinstance(one, Mapping) for one in state.values()):
        raise _refuse_dict(
            inner, "a dict of state for numbers in 'params'", f"others {stray}"
        )


def _check_group(
    inner: torch.optim.Optimizer,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    opened: _core.OptimizerConfig,
) -> None:
    """Checks a group's options: those of this class, and no other rule than opened."""
    required = required_options(inner)
    foreign = known_options() - inner.defaults.keys() - group.keys()
    if not required <= saved.keys() or foreign & saved.keys():
        found = sorted(str(name) for name in saved if name != "params")
        raise _refuse_dict(inner, f"options {sorted(required)}", str(found))
    decoupled = group.get(DECOUPLED)
    if saved.get(DECOUPLED, decoupled) != decoupled:
        raise _refuse_dict(inner, f"{DECOUPLED}={decoupled}", f"{not decoupled}")
    try:
        config = read_group(inner, {**group, **saved})
    except (TypeError, ValueError) as error:
        raise _refuse_dict(inner, "values that it takes", str(error)) from error
    if config.kind != opened.kind or state_parts(config) != state_parts(opened):
        raise InvalidArgumentError(
            f"load_state_dict of {type(inner).__name__}: the servers keep "
            f"{_describe(opened)}, found options of {_describe(config)}. Nothing was "
            "changed. Build the optimizer with those options and wrap it again."
        )


def _describe(config: _core.OptimizerConfig) -> str:
    return f"{config.kind} with state {[part.name for part in state_parts(config)]}"


def check_dicts(
    inners: Sequence[torch.optim.Optimizer],
    dicts: Sequence[Any],
    rules: Rules,
) -> None:
    """Checks the form and options of one ``state_dict`` for each inner optimizer.

    Args:
        inners: the wrapped optimizers.
        dicts: what was passed for them.
        rules: of all groups in order, as when they were wrapped.

    Raises:
        InvalidArgumentError: they belong to other optimizers.
        UnsupportedOptimizerError: an option has a value the servers do not honour.
    """
    if not isinstance(dicts, Sequence) or len(dicts) != len(inners):
        count = len(dicts) if isinstance(dicts, Sequence) else 0
        raise InvalidArgumentError(
            f"load_state_dict: state of {count} optimizers, expected {len(inners)}. "
            "Nothing was changed. Pass what state_dict() of the same optimizers "
            "returned."
        )
    opened = iter(rules)
    for inner, saved in zip(inners, dicts, strict=True):
        _check_form(inner, saved)
        groups = zip(inner.param_groups, saved["param_groups"], strict=True)
        for own, group in groups:
            rule = next(opened)
            if rule is not None:
                _check_group(inner, own, group, rule)
