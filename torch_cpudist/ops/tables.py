# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Typed wrappers of the ops over all tables of a step.

One call for all tables: a call for each would take Python's lock as often, for which
the threads of replicas then queue. Local, without the GIL, as all ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_cpudist import _core
from torch_cpudist.ops.checks import (
    config_arguments,
    fail,
    require_contiguous,
    require_in_range,
    require_length,
    require_real,
    require_tensor,
)

#: Keys int64 ``[n]``, or ``[1, n]`` as a sparse gradient has them, and rows ``[n,
#: dim]``.
Piece = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TableStep:
    """The coming step of one table.

    Attributes:
        weight: float32 or float64 ``[rows, dim]``, contiguous.
        states: ``[rows, ...]`` each, contiguous, of the same dtype: the parts of the
            optimizer's state in the servers' order (``rules.state_parts``).
        config: optimizer and hyper-parameters.
        step: number of this update, from 1, one for all rows.
        ascend: gradients are taken with the other sign.
        first: the owner of all rows where there are few.
    """

    weight: torch.Tensor
    states: Sequence[torch.Tensor]
    config: _core.OptimizerConfig
    step: int
    ascend: bool = False
    first: int = 0


def sum_table_rows(tables: Sequence[Sequence[Piece]]) -> list[Piece]:
    """``dedupe_segment_sum`` of several tables at once.

    Args:
        tables: by table its pieces, which are taken as one behind the other.

    Returns:
        By table the distinct keys int64 ``[u]`` in the order of first occurrence, and
        the sums ``[u, dim]`` of their rows.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        InvalidArgumentError: shapes do not fit.
    """
    op = "sum_table_rows"
    if not tables:
        return []
    keys, rows, pieces = _flat(op, tables)
    return _pairs(torch.ops.torch_cpudist.sum_table_rows(keys, rows, pieces))


class TablesStep:
    """``update_rows`` of several tables at once, each by the sums of its pieces.

    Thread safety: ``run`` may be called by several threads, each for another owner.
    """

    def __init__(
        self, tables: Sequence[Sequence[Piece]], steps: Sequence[TableStep]
    ) -> None:
        """Checks and packs what owners have in common.

        Args:
            tables: by table its pieces, which are taken as one behind the other.
            steps: of each table.

        Raises:
            TypeError: an argument is no tensor or has another dtype.
            InvalidArgumentError: shapes, strides or a step number do not fit.
        """
        op = "step_table_rows"
        require_length(op, "len(steps)", len(steps), len(tables))
        self._tables, self._steps = tables, steps
        self._keys, self._rows, self._pieces = _flat(op, tables)
        self._facts: list[int] = []
        self._hyper: list[float] = []
        known: dict[int, tuple[int, int, list[float]]] = {}
        for pieces, step in zip(tables, steps, strict=True):
            _check_step(op, pieces, step)
            if id(step.config) not in known:
                known[id(step.config)] = config_arguments(step.config)
            kind, flags, hyper = known[id(step.config)]
            self._facts += [kind, flags, step.step, len(step.states)]
            self._facts += [int(step.ascend), step.first]
            self._hyper += hyper
        self._weights = [step.weight.detach() for step in steps]
        self._states = [state for step in steps for state in step.states]
        self._written = [*(step.weight for step in steps), *self._states]

    def run(self, owner: int, owners: int, deal_from: int) -> list[Piece]:
        """Sums and steps the rows of one owner, in place. Not recorded by autograd.

        Args:
            owner: whose rows, from 0.
            owners: how many there are.
            deal_from: tables of fewer keys are their first owner's alone.

        Returns:
            By table the keys that were this owner's, and the sums of their rows.

        Raises:
            RowOutOfRangeError: a key is outside of its table; nothing was written.
            InvalidArgumentError: ``owner`` is not in ``[0, owners)``.
        """
        op = "step_table_rows"
        if not 0 <= owner < owners:
            fail(f"{op}: owner must be in [0, {owners}), got {owner}")
        if not self._steps:
            return []
        try:
            found = torch.ops.torch_cpudist.step_table_rows(
                self._keys,
                self._rows,
                self._pieces,
                self._weights,
                self._states,
                self._facts,
                self._hyper,
                owner,
                owners,
                deal_from,
            )
        except RuntimeError:
            for pieces, step in zip(self._tables, self._steps, strict=True):
                for keys, _ in pieces:
                    require_in_range(op, "keys", keys, step.weight.shape[0])
            raise
        torch.autograd.graph.increment_version(self._written)
        return _pairs(found)


def _flat(
    op: str, tables: Sequence[Sequence[Piece]]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Keys, rows, and how many of them each table has."""
    keys = [piece[0] for pieces in tables for piece in pieces]
    rows = [piece[1] for pieces in tables for piece in pieces]
    for one in keys:
        require_tensor(op, "keys", one, (torch.int64,), None)
    for one in rows:
        require_real(op, "rows", one, 2)
    return keys, rows, [len(pieces) for pieces in tables]


def _pairs(found: Sequence[torch.Tensor]) -> list[Piece]:
    return list(zip(found[::2], found[1::2], strict=True))


def _check_step(op: str, pieces: Sequence[Piece], step: TableStep) -> None:
    require_real(op, "weight", step.weight, 2)
    require_contiguous(op, "weight", step.weight)
    for state in step.states:
        require_tensor(op, "state", state, (step.weight.dtype,), None)
        require_contiguous(op, "state", state)
    for _, rows in pieces:
        if rows.dtype != step.weight.dtype:
            raise TypeError(
                f"{op}: rows must be {step.weight.dtype}, as the weight is, got "
                f"{rows.dtype}"
            )
        require_length(op, "rows.shape[1]", rows.shape[1], step.weight.shape[1])
    if step.step < 1:
        fail(f"{op}: step must be >= 1, got {step.step}")
