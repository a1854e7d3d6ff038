# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A placement, its rules and their state in the words of a snapshot's manifest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_cpudist import _core
from torch_cpudist.model.placement import DenseParameter, Placement
from torch_cpudist.rules.state_parts import state_parts
from torch_cpudist.served.state_layout import row_elements
from torch_cpudist.snapshot import manifest as told
from torch_cpudist.snapshot.names import table_salt
from torch_cpudist.tables.remote_weight import table_of

DTYPES = {torch.float32: "F32", torch.float64: "F64"}
_OPTIONS = (
    *("lr", "momentum", "dampening", "weight_decay", "beta1", "beta2", "eps", "alpha"),
    *("lr_decay", "initial_accumulator", "l1", "l2", "lr_power", "nesterov"),
)


def rule_of(config: _core.OptimizerConfig | None) -> told.Rule:
    """A rule with its options; of one that only torch knows, no more than that."""
    if config is None:
        return told.Rule("torch")
    return told.Rule(config.kind, {name: getattr(config, name) for name in _OPTIONS})


def dense_states(config: _core.OptimizerConfig | None) -> tuple[told.DenseState, ...]:
    """Parts of the state of a dense parameter, in the servers' order."""
    parts = [] if config is None else state_parts(config)
    return tuple(told.DenseState(part.name, part.per_row) for part in parts)


def table_states(
    config: _core.OptimizerConfig, dim: int
) -> tuple[told.StateSlice, ...]:
    """Which elements of the state of a row are which part."""
    slices, at = [], 0
    for part in state_parts(config):
        elements = row_elements(part, dim)
        slices.append(told.StateSlice(part.name, at, elements))
        at += elements
    return tuple(slices)


def tables_of(placement: Placement, steps: Sequence[int]) -> tuple[told.Table, ...]:
    """The tables of a placement.

    Args:
        placement: as servers have it.
        steps: updates of each table.
    """
    layout = placement.layout
    found = []
    for table, step in zip(placement.tables, steps, strict=True):
        spec = layout.tables[table.index]
        config = layout.configs[spec.group]
        weight = table.found.weight
        found.append(
            told.Table(
                name=spec.name,
                rows=spec.rows,
                dim=spec.dim,
                remote=spec.remote,
                salt=table_salt(spec.name),
                # That of a snapshot that was loaded, if one was.
                seed=table_of(weight).seed_of(spec.name) if spec.remote else 0,
                initial=tuple((name, a, b) for name, a, b in spec.initial),
                overrides=tuple((begin, end, v) for begin, end, v in spec.overrides),
                rule=rule_of(config),
                state=table_states(config, spec.dim),
                step=step,
                open=table_of(weight).open if spec.open else None,
            )
        )
    return tuple(found)


def row_width(entry: DenseParameter) -> int:
    """Elements of a row of a dense parameter, for rules with state per row."""
    shape = entry.shape
    return max(shape[1:].numel(), 1) if len(shape) > 1 else 1


def dense_of(placement: Placement, steps: Sequence[int]) -> tuple[told.Dense, ...]:
    """The dense parameters of a placement.

    Args:
        placement: as servers have it.
        steps: updates of each block of the layout.
    """
    layout = placement.layout
    found = []
    for entry in placement.dense:
        blocks = [
            told.Block(block.name, block.offset, block.elements, block.shard, step)
            for block, step in zip(layout.blocks, steps, strict=True)
            if block.parameter == entry.index
        ]
        config = layout.configs[entry.group]
        found.append(
            told.Dense(
                name=entry.name,
                shape=tuple(entry.shape),
                dtype=DTYPES[entry.dtype],
                row_width=row_width(entry),
                rule=rule_of(config),
                state=dense_states(config),
                blocks=tuple(sorted(blocks, key=lambda block: block.offset)),
            )
        )
    return tuple(found)
