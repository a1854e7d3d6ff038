# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A table under torch's own optimizer, whose touched rows all owners update together.

One owner alone would still be at it when the others have updated all the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_cpudist import ops
from torch_cpudist.replicas.row_steps import RowStep
from torch_cpudist.replicas.row_tables import RowTable

# Fewer rows of all replicas are done by one thread before several have shared them out.
_DEAL_FROM_ROWS = 4096


class RowParts:
    """The rows of one table in one step. One thread at a time, but for ``step``."""

    def __init__(
        self,
        table: RowTable,
        row_step: RowStep,
        grads: Sequence[torch.Tensor],
        owners: Sequence[int],
    ) -> None:
        """Deals rows to owners by their keys; few go to the first owner.

        Args:
            table: the table.
            row_step: its coming step.
            grads: sparse gradients, to be added in their order.
            owners: who may take rows.
        """
        self.table = table
        self._row_step = row_step
        self._grads = grads
        few = sum(grad._nnz() for grad in grads) < _DEAL_FROM_ROWS
        self._owners = list(owners[:1] if few else owners)
        self._sums: list[tuple[torch.Tensor, torch.Tensor] | None]
        self._sums = [None] * len(self._owners)

    def step(self, owner: int) -> None:
        """Sums an owner's rows and steps them; run by its thread."""
        if owner not in self._owners:
            return
        part = self._owners.index(owner)
        found = [self._part_of(grad, part) for grad in self._grads]
        keys, rows = (torch.cat(pieces) for pieces in zip(*found, strict=True))
        summed = ops.dedupe_segment_sum(keys, rows)
        self._sums[part] = summed
        # A look that makes nothing: owners share the optimizer's dict.
        state: Mapping[str, Any] = self.table.optimizer.state.get(self.table.weight, {})
        self._row_step.run(self.table.weight, state, *summed)

    def _part_of(
        self, grad: torch.Tensor, part: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and rows of one gradient that an owner has."""
        keys, rows = grad._indices()[0].contiguous(), grad._values()
        parts = len(self._owners)
        if parts == 1:
            return keys, rows
        bucket_owner = torch.arange(ops.BUCKET_COUNT) % parts
        order, offsets = ops.partition_keys(keys, bucket_owner, 0, parts)
        begin, end = offsets[part : part + 2].tolist()
        mine = order[begin:end]
        return keys.index_select(0, mine), ops.gather_rows(rows, mine)

    def finish(self) -> None:
        """Counts the step, when all owners have stepped."""
        state = self.table.optimizer.state
        if self.table.weight in state:
            self._row_step.count(state[self.table.weight])

    def total(self) -> torch.Tensor:
        """The sum of the gradients, every key once. After all have stepped."""
        sums = [pair for pair in self._sums if pair is not None]
        return torch.sparse_coo_tensor(
            torch.cat([keys for keys, _ in sums])[None],
            torch.cat([rows for _, rows in sums]),
            self.table.weight.shape,
            check_invariants=False,
        )
