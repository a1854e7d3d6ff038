# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Averages sparse gradients over all trainers as keys and rows, never whole tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_cpudist import ops
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.model.gradients import read_table_gradient
from torch_cpudist.model.placement import PlacedTable

_WHAT = "averaging gradients of tables"

# Distinct keys int64 [n] and their rows float32 [n, dim].
Rows = tuple[torch.Tensor, torch.Tensor]


def own_rows(tables: Sequence[PlacedTable]) -> list[Rows | None]:
    """This trainer's gradients, duplicates summed; ``None`` where there is none.

    Raises:
        DenseGradientError, UnsupportedModelError: a gradient is not what it must be.
    """
    found: list[Rows | None] = []
    for table in tables:
        grad = table.found.weight.grad
        if grad is None:
            found.append(None)
        else:
            keys, values = read_table_gradient(table.found.name, grad)
            found.append(ops.dedupe_segment_sum(keys, values))
    return found


class RowExchange:
    """Averages rows over the trainers. Not thread-safe.

    Cost per table: every trainer gets the keys and rows of all, each filled up to the
    largest number of them.
    """

    def __init__(self, group: CollectiveGroup, tables: Sequence[PlacedTable]) -> None:
        """Exchanges gradients of ``tables`` over ``group``."""
        self._group = group
        self._tables = tables

    def average(
        self,
        rows: Sequence[Rows | None],
        counts: Sequence[Sequence[int]],
        weight: int,
        total: float,
    ) -> list[Rows]:
        """Returns the mean of each table, with the same bits on all trainers.

        Args:
            rows: by table, this trainer's.
            counts: by table, how many rows each trainer has.
            weight: of this trainer.
            total: of all trainers.
        """
        found = []
        for table, own, each in zip(self._tables, rows, counts, strict=True):
            dim = table.found.weight.shape[1]
            keys, values = own if own is not None else _none(dim)
            if not self._group.alone:
                scaled = values * weight if weight else torch.zeros_like(values)
                gathered = self._gather(keys, scaled, each)
                keys, values = ops.dedupe_segment_sum(*gathered)
                values = values * (1.0 / total)
            found.append((keys, values))
        return found

    def _gather(
        self, keys: torch.Tensor, values: torch.Tensor, each: Sequence[int]
    ) -> Rows:
        """All trainers' keys and rows, in the order of ranks."""
        most = max(each)
        parts = []
        for own in (keys, values):
            padded = own.new_zeros((most, *own.shape[1:]))
            padded[: len(own)] = own
            gathered = self._group.gather(padded, _WHAT) if most else []
            cut = [part[:count] for part, count in zip(gathered, each, strict=False)]
            parts.append(torch.cat([own[:0], *cut]))
        return parts[0], parts[1]


def _none(dim: int) -> Rows:
    keys = torch.empty(0, dtype=torch.int64, device="cpu")
    # Whatever torch's default dtype is.
    return keys, torch.empty(0, dim, dtype=torch.float32, device="cpu")


def as_gradient(rows: Rows, weight: torch.Tensor) -> torch.Tensor:
    """Rows as a sparse gradient of ``weight``."""
    keys, values = rows
    return torch.sparse_coo_tensor(
        keys[None], values, weight.shape, check_invariants=False
    )
