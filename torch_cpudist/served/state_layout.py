# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer state between the servers' layout and ``torch.optim``'s.

On a server, state stands behind the weight it belongs to: per row of a table, per block
of a dense parameter, the parts of a rule one after the other (Adam: all ``m``, then all
``v``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_cpudist import _core
from torch_cpudist.errors import ModelChangedError
from torch_cpudist.model.placement import DenseParameter, PlacedTable
from torch_cpudist.rules.state_parts import (
    ROW_STEP,
    StatePart,
    check_state,
    part_shape,
    state_parts,
)
from torch_cpudist.served.progress import Sending
from torch_cpudist.served.set import ParameterSet, row_runs


def received(size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Makes memory that the core writes to; torch's default dtype has no say."""
    return torch.empty(size, dtype=dtype, device="cpu")


def _sent(
    name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Lays a tensor out as the core reads it: shape, dtype, on the CPU, contiguous."""
    tensor = tensor.detach()
    if tensor.shape != torch.Size(shape):
        raise ModelChangedError(
            f"{name}: shape {tuple(tensor.shape)}, expected {tuple(shape)} as when its "
            "optimizer was wrapped. Wrap the optimizer again after a change of shape."
        )
    # torch's SGD keeps the momentum of sparse gradients in a sparse tensor.
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.to(device="cpu", dtype=dtype).contiguous()


def _step_value(config: _core.OptimizerConfig, step: int) -> Any:
    # torch's SparseAdam counts in a plain int, all others in a float32 tensor.
    if config.kind == "sparse_adam":
        return step
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def _finish(
    config: _core.OptimizerConfig, step: int, state: dict[str, Any]
) -> dict[str, Any]:
    if config.kind == "sgd":
        if step == 0:
            state["momentum_buffer"] = None
        return state if config.momentum else {}
    return {"step": _step_value(config, step), **state}


def row_elements(part: StatePart, dim: int) -> int:
    """Elements of one part of the state of one row of a table."""
    return 1 if part.per_row else dim


def _table_shape(parameters: ParameterSet, table: PlacedTable) -> tuple[int, int]:
    """Rows and row length, as the servers hold the table."""
    spec = parameters.placement.layout.tables[table.index]
    return spec.rows, spec.dim


def fetch_table_state(
    parameters: ParameterSet, table: PlacedTable, config: _core.OptimizerConfig
) -> dict[str, Any]:
    """Fetches the state of a whole table in torch's form.

    Cost: all rows with state, in chunks.
    """
    rows, dim = _table_shape(parameters, table)
    parts = state_parts(config)
    widths = [row_elements(part, dim) for part in parts]
    tensors = [received((rows, width), torch.float32) for width in widths]
    counts = received(rows, torch.int32)
    step = 0
    for begin, end in row_runs(rows, dim + sum(widths)):
        updates = counts[begin:end]
        state = received((end - begin, sum(widths)), torch.float32)
        step = parameters.opened.fetch_run(
            table.index, begin, end, 0, state.data_ptr(), updates.data_ptr()
        )
        for tensor, columns in zip(
            tensors, torch.split(state, widths, dim=1), strict=True
        ):
            tensor[begin:end] = columns
    return name_table_state(config, tensors, counts, step)


def name_table_state(
    config: _core.OptimizerConfig,
    tensors: list[torch.Tensor],
    counts: torch.Tensor,
    step: int,
) -> dict[str, Any]:
    """Puts a table's state into torch's form.

    Args:
        config: the table's rule.
        tensors: float32 ``[rows, elements]``, one for each part of the rule.
        counts: int32 ``[rows]``, updates of each row.
        step: updates of the table.
    """
    named = {
        part.name: tensor.reshape(len(tensor)) if part.per_row else tensor
        for part, tensor in zip(state_parts(config), tensors, strict=True)
    }
    return _finish(config, step, named) | {ROW_STEP: counts}


def unname_table_state(
    name: str,
    shape: tuple[int, int],
    config: _core.OptimizerConfig,
    state: Mapping[str, Any],
) -> tuple[list[torch.Tensor], torch.Tensor | None, int]:
    """The reverse of ``name_table_state``: columns, counts and step.

    Args:
        name: the table's, for messages.
        shape: rows and row length.
        config: the table's rule.
        state: torch's state of this parameter; empty means initial.

    Returns:
        As taken by ``name_table_state``; no columns or no counts where there are none.

    Raises:
        InvalidArgumentError: a part is missing or of another shape.
    """
    rows, dim = shape
    present = check_state(name, shape, config, state)
    step = int(state.get("step") or 0)
    columns = [
        _sent(
            f"{part.name} of {name}",
            state[part.name],
            part_shape(part, shape),
            torch.float32,
        ).reshape(rows, row_elements(part, dim))
        for part in state_parts(config)
        if present
    ]
    counts = state.get(ROW_STEP)
    if counts is None and present:
        # A state saved by torch itself knows no rows: every row counts the table's
        # steps.
        steps = max(step, 1) if config.kind == "sgd" else step
        counts = torch.full((rows,), steps, dtype=torch.int32, device="cpu")
    if counts is not None:
        counts = _sent(f"{ROW_STEP} of {name}", counts, (rows,), torch.int32)
    return columns, counts, step


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
    name = table.found.name
    shape = _table_shape(parameters, table)
    columns, counts, step = unname_table_state(name, shape, config, state)
    values = _sent(name, weight, shape, torch.float32)
    progress = Sending(name, shape[0])
    width = sum(column.shape[1] for column in columns)
    for begin, end in row_runs(shape[0], shape[1] + width):
        packed = torch.cat([c[begin:end] for c in columns], dim=1) if columns else None
        parameters.opened.store_run(
            table.index,
            begin,
            end,
            values[begin:].data_ptr(),
            packed.data_ptr() if packed is not None else 0,
            counts[begin:].data_ptr() if counts is not None else 0,
            step,
        )
        progress.sent(end)


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


@dataclass(frozen=True)
class FetchedDense:
    """A dense parameter as all servers have it together.

    Attributes:
        weight: its values, flattened.
        state: its parts one after the other, each as of one block of all elements.
        step: its updates.
    """

    weight: torch.Tensor
    state: torch.Tensor
    step: int


def fetch_dense(
    parameters: ParameterSet, entry: DenseParameter, config: _core.OptimizerConfig
) -> FetchedDense:
    """Fetches a dense parameter with its state."""
    weight, tensors, step = _fetched(parameters, entry, config)
    state = torch.cat(tensors) if tensors else received(0, entry.dtype)
    return FetchedDense(weight, state, step)


def fetch_dense_state(
    parameters: ParameterSet, entry: DenseParameter, config: _core.OptimizerConfig
) -> dict[str, Any]:
    """Fetches the state of a dense parameter in torch's form."""
    _, tensors, step = _fetched(parameters, entry, config)
    named = {
        part.name: tensor.reshape(part_shape(part, entry.shape))
        for part, tensor in zip(state_parts(config), tensors, strict=True)
    }
    return _finish(config, step, named)


def _fetched(
    parameters: ParameterSet, entry: DenseParameter, config: _core.OptimizerConfig
) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Values, the parts of the state, flattened, and the step."""
    parts = state_parts(config)
    runs = _block_runs(parameters, entry, parts)
    weights = received(entry.shape.numel(), entry.dtype)
    packed = received(sum(last - first for _, first, last in runs), entry.dtype)
    step = parameters.opened.fetch_parameter(
        entry.index, weights.data_ptr(), packed.data_ptr()
    )
    shapes = [part_shape(part, entry.shape) for part in parts]
    tensors = [received(shape.numel(), entry.dtype) for shape in shapes]
    at = 0
    for i, first, last in runs:
        tensors[i][first:last] = packed[at : at + last - first]
        at += last - first
    return weights, tensors, step


def store_dense_state(
    parameters: ParameterSet,
    entry: DenseParameter,
    config: _core.OptimizerConfig,
    state: Mapping[str, Any],
    weight: torch.Tensor,
    average: torch.Tensor | None = None,
) -> None:
    """Sends a dense parameter's values and state to the servers.

    Args:
        parameters: the open parameter set.
        entry: the parameter.
        config: its rule.
        state: torch's state of it; empty means initial.
        weight: its values.
        average: its moving average; ``None``: the values.
    """
    parts = state_parts(config)
    values = _sent(entry.name, weight, entry.shape, entry.dtype)
    packed = None
    step = int(state.get("step") or 0)
    if check_state(entry.name, entry.shape, config, state):
        flat = [
            _sent(
                f"{part.name} of {entry.name}",
                state[part.name],
                part_shape(part, entry.shape),
                entry.dtype,
            ).reshape(-1)
            for part in parts
        ]
        runs = _block_runs(parameters, entry, parts)
        if runs:
            packed = torch.cat([flat[i][first:last] for i, first, last in runs])
        if config.kind == "sgd":
            step = max(step, 1)
    averages = None
    if average is not None:
        averages = _sent(f"average of {entry.name}", average, entry.shape, entry.dtype)
    parameters.opened.store_parameter(
        entry.index,
        values.data_ptr(),
        packed.data_ptr() if packed is not None else 0,
        step,
        averages.data_ptr() if averages is not None else 0,
    )
