# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer state between the servers' layout and ``torch.optim``'s.

On a server, state stands behind the weight it belongs to: per row of a table, per block
of a dense parameter, the parts of a rule one after the other (Adam: all ``m``, then all
``v``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_cpudist import _core
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.parameter_set import ParameterSet, key_chunks
from torch_cpudist.placement import DenseParameter, PlacedTable

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


def _step_value(config: _core.OptimizerConfig, step: int) -> Any:
    # torch's SparseAdam counts in a plain int, all others in a float tensor.
    return step if config.kind == "sparse_adam" else torch.tensor(float(step))


def _finish(
    config: _core.OptimizerConfig, step: int, state: dict[str, Any]
) -> dict[str, Any]:
    if config.kind == "sgd":
        if step == 0:
            state["momentum_buffer"] = None
        return state if config.momentum else {}
    return {"step": _step_value(config, step), **state}


def _dense(value: torch.Tensor) -> torch.Tensor:
    # torch's SGD keeps the momentum of sparse gradients in a sparse tensor.
    value = value.detach()
    return value.to_dense() if value.is_sparse else value


def _row_elements(part: StatePart, dim: int) -> int:
    return 1 if part.per_row else dim


def fetch_table_state(
    parameters: ParameterSet, table: PlacedTable, config: _core.OptimizerConfig
) -> dict[str, Any]:
    """Fetches the state of a whole table in torch's form.

    Cost: all rows with state, in chunks.
    """
    rows, dim = table.found.weight.shape
    parts = state_parts(config)
    widths = [_row_elements(part, dim) for part in parts]
    tensors = [torch.empty(rows, width) for width in widths]
    counts = torch.empty(rows, dtype=torch.int32)
    step = 0
    for keys in key_chunks(rows):
        weights = torch.empty(len(keys), dim)
        state = torch.empty(len(keys), sum(widths))
        updates = torch.empty(len(keys), dtype=torch.int32)
        step = parameters.client.fetch_table(
            parameters.id,
            table.index,
            keys.data_ptr(),
            len(keys),
            weights.data_ptr(),
            state.data_ptr(),
            updates.data_ptr(),
        )
        for tensor, columns in zip(
            tensors, torch.split(state, widths, dim=1), strict=True
        ):
            tensor[keys[0] : keys[-1] + 1] = columns
        counts[keys[0] : keys[-1] + 1] = updates
    named = {
        part.name: tensor.reshape(rows) if part.per_row else tensor
        for part, tensor in zip(parts, tensors, strict=True)
    }
    return _finish(config, step, named) | {ROW_STEP: counts}


def store_table_state(
    parameters: ParameterSet,
    table: PlacedTable,
    config: _core.OptimizerConfig,
    state: Mapping[str, Any],
    weight: torch.Tensor,
) -> None:
    """Sends a table's weight and state to the servers.

    Args:
        parameters: the open parameter set.
        table: the table.
        config: its rule.
        state: torch's state of this parameter; empty means initial.
        weight: float32 ``[rows, dim]``.
    """
    rows, dim = weight.shape
    parts = state_parts(config)
    step = int(state.get("step", 0))
    present = _check_state(table.found.name, parts, state)
    columns = [
        _dense(state[part.name]).float().reshape(rows, _row_elements(part, dim))
        for part in parts
        if present
    ]
    counts = state.get(ROW_STEP)
    if counts is None and present:
        # A state saved by torch itself knows no rows: every row counts the table's
        # steps.
        counts = torch.full((rows,), max(step, 1 if config.kind == "sgd" else step))
    for keys in key_chunks(rows):
        span = slice(int(keys[0]), int(keys[-1]) + 1)
        packed = torch.cat([c[span] for c in columns], dim=1) if columns else None
        updates = None if counts is None else counts[span].to(torch.int32).contiguous()
        values = weight[span].contiguous()
        parameters.client.store_table(
            parameters.id,
            table.index,
            keys.data_ptr(),
            len(keys),
            values.data_ptr(),
            packed.data_ptr() if packed is not None else 0,
            updates.data_ptr() if updates is not None else 0,
            step,
        )


def _check_state(name: str, parts: list[StatePart], state: Mapping[str, Any]) -> bool:
    """Returns whether state is there; all parts or none must be."""
    missing = [part.name for part in parts if state.get(part.name) is None]
    if missing and len(missing) < len(parts):
        raise InvalidArgumentError(
            f"load_state_dict: state of {name!r} lacks {missing}, expected "
            f"{[part.name for part in parts]}; it comes from another optimizer."
        )
    return bool(parts) and not missing


def _block_runs(
    parameters: ParameterSet, entry: DenseParameter, parts: list[StatePart]
) -> list[tuple[int, int, int]]:
    """Lists (part, first, last) of each run of the parameter's state, in wire order.

    ``first`` and ``last`` count elements of the part's flattened tensor.
    """
    runs = []
    for block in parameters.placement.layout.blocks:
        if block.parameter != entry.index:
            continue
        for i, part in enumerate(parts):
            unit = block.row_width if part.per_row else 1
            runs.append(
                (i, block.offset // unit, (block.offset + block.elements) // unit)
            )
    return runs


def fetch_dense_state(
    parameters: ParameterSet, entry: DenseParameter, config: _core.OptimizerConfig
) -> dict[str, Any]:
    """Fetches the state of a dense parameter in torch's form."""
    parts = state_parts(config)
    runs = _block_runs(parameters, entry, parts)
    parameter = entry.parameter
    weights = torch.empty(parameter.numel(), dtype=parameter.dtype)
    packed = torch.empty(
        sum(last - first for _, first, last in runs), dtype=parameter.dtype
    )
    step = parameters.client.fetch_parameter(
        parameters.id, entry.index, weights.data_ptr(), packed.data_ptr()
    )
    rows = parameter.shape[0] if parameter.dim() else 1
    tensors = [
        torch.empty(rows if part.per_row else parameter.numel(), dtype=parameter.dtype)
        for part in parts
    ]
    at = 0
    for i, first, last in runs:
        tensors[i][first:last] = packed[at : at + last - first]
        at += last - first
    named = {
        part.name: tensor if part.per_row else tensor.reshape(parameter.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    }
    return _finish(config, step, named)


def store_dense_state(
    parameters: ParameterSet,
    entry: DenseParameter,
    config: _core.OptimizerConfig,
    state: Mapping[str, Any],
    weight: torch.Tensor,
) -> None:
    """Sends a dense parameter's values and state to the servers."""
    parts = state_parts(config)
    values = weight.detach().contiguous()
    packed = None
    step = int(state.get("step", 0))
    if _check_state(entry.name, parts, state):
        flat = [
            state[part.name].detach().to(values.dtype).reshape(-1) for part in parts
        ]
        runs = _block_runs(parameters, entry, parts)
        if runs:
            packed = torch.cat([flat[i][first:last] for i, first, last in runs])
        if config.kind == "sgd":
            step = max(step, 1)
    parameters.client.store_parameter(
        parameters.id,
        entry.index,
        values.data_ptr(),
        packed.data_ptr() if packed is not None else 0,
        step,
    )
