# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables that are stepped by row: which of them, how, and by whom.

A step passes over the rows once where torch's sparse operators sort, search and copy
them several times. State stays where the optimizer keeps it; the numbers are those of
torch's step, but for rounding. Owners share the rows of a table out: one alone would
still be at it when the others have updated all the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist import _core, ops, optim
from torch_cpudist.errors import UnsupportedOptimizerError
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.rules.read import read_group
from torch_cpudist.rules.state_parts import part_shape, state_parts

# Fewer rows of all replicas are done by one thread before several have shared them out.
DEAL_FROM_ROWS = 4096
# These read and write nothing but the rows of a sparse gradient.
_BY_ROW = (
    optim.FTRL,
    optim.RowWiseAdagrad,
    torch.optim.Adagrad,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)


def fits_class(optimizer: Optimizer) -> bool:
    """Whether an optimizer is of a class that keeps to the rows of a gradient."""
    return type(optimizer) in _BY_ROW


class RowStep:
    """What one step does to the rows of one table. ``run`` is thread-safe.

    Disjoint rows may be stepped by several threads at once.
    """

    def __init__(
        self, config: _core.OptimizerConfig, names: list[str], step: int, ascend: bool
    ) -> None:
        """See ``of``."""
        self._config = config
        self._names = names
        self._step = step
        self._ascend = ascend

    @staticmethod
    def of(
        optimizer: Optimizer, group: Mapping[str, Any], weight: torch.Tensor
    ) -> RowStep | None:
        """The coming step, with the options and the state of this moment.

        Args:
            optimizer: of a class that ``fits_class``.
            group: that of its groups which has ``weight``.
            weight: the table's, ``[rows, dim]``.

        Returns:
            ``None`` where torch has to do it: options that touch every row, state that
            its first step makes, or tensors that the kernels do not take.
        """
        momentum, decay = group.get("momentum"), group.get("weight_decay")
        of_torch = type(optimizer).__module__.startswith("torch.")
        if momentum or (decay and of_torch):
            return None
        if weight.dtype not in (torch.float32, torch.float64) or weight.dim() != 2:
            return None
        ascend = bool(group.get("maximize"))
        try:
            config = read_group(optimizer, {**group, "maximize": False})
        except UnsupportedOptimizerError:
            return None
        state = optimizer.state.get(weight, {})
        parts = state_parts(config)
        for part in parts:
            kept = state.get(part.name)
            if (
                not isinstance(kept, torch.Tensor)
                or kept.dtype != weight.dtype
                or kept.shape != part_shape(part, weight.shape)
                or not kept.is_contiguous()
            ):
                return None
        if (parts and "step" not in state) or not weight.is_contiguous():
            return None
        names = [part.name for part in parts]
        return RowStep(config, names, int(state.get("step", 0)) + 1, ascend)

    def run(
        self,
        weight: torch.Tensor,
        state: Mapping[str, Any],
        keys: torch.Tensor,
        grads: torch.Tensor,
    ) -> None:
        """Steps some rows in place. Not recorded by autograd.

        Args:
            weight: ``[rows, dim]``, that of ``of`` or a copy.
            state: what the optimizer keeps for ``weight``.
            keys: int64 ``[n]``, distinct.
            grads: ``[n, dim]``, left as they are.
        """
        grads = -grads if self._ascend else grads
        kept = [state[name] for name in self._names]
        if len(kept) < 2:
            none = weight.new_empty((len(weight), 0))
            whole = kept[0].view(len(weight), -1) if kept else none
            self._update(weight, whole, keys, grads)
            return
        # The kernels have the state of a row in one piece.
        rows = ops.gather_rows(weight, keys)
        pieces = [ops.gather_rows(tensor, keys) for tensor in kept]
        joined = torch.cat(pieces, dim=1)
        self._update(rows, joined, torch.arange(len(keys)), grads)
        ops.scatter_rows(weight, keys, rows)
        for tensor, piece in zip(kept, joined.chunk(len(kept), 1), strict=True):
            ops.scatter_rows(tensor, keys, piece.contiguous())

    def _update(
        self,
        weight: torch.Tensor,
        state: torch.Tensor,
        keys: torch.Tensor,
        grads: torch.Tensor,
    ) -> None:
        ops.update_rows(weight, state, keys, grads, self._config, step=self._step)

    def count(self, state: MutableMapping[str, Any]) -> None:
        """Counts the step where an optimizer does; by one thread, after ``run``."""
        if "step" in state:
            state["step"] += 1


@dataclass(frozen=True)
class RowTable:
    """A table and who steps it.

    Attributes:
        weight: ``[rows, dim]``.
        index: its place among the model's parameters.
        optimizer: whose parameter it is.
        optimizer_index: the optimizer's place among the executor's.
    """

    weight: nn.Parameter
    index: int
    optimizer: Optimizer
    optimizer_index: int

    def grads(self, models: ReplicaModels, summed: bool) -> list[torch.Tensor]:
        """Gradients there are: the model's, or those of the replicas in their order."""
        holders = [self.weight] if summed else [v[self.index] for v in models.views]
        return [p.grad for p in holders if p.grad is not None]

    def rows(self, models: ReplicaModels) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct keys int64 ``[n]`` and rows ``[n, dim]`` of the model's gradient."""
        (grad,) = self.grads(models, summed=True)
        keys, rows = grad._indices()[0], grad._values()
        if grad.is_coalesced():
            return keys, rows
        return ops.dedupe_segment_sum(keys.contiguous(), rows.contiguous())


def row_steps(
    optimizers: Sequence[Optimizer],
    divisible: Sequence[bool],
    models: ReplicaModels,
    summed: bool,
) -> Iterator[tuple[RowTable, RowStep, list[torch.Tensor]]]:
    """Yields the tables that are stepped by row in this step, how, and by what.

    The same for replicas that share a table as for those that have copies. Not a table
    of several optimizers, whose steps have an order.

    Args:
        optimizers: of the executor.
        divisible: which of them may step parts of their parameters.
        models: have the gradients.
        summed: whether they are in the model by now; else they are the replicas'.
    """
    found = list(_tables(optimizers, models))
    times = Counter(table.index for table, _ in found)
    for table, group in found:
        if times[table.index] > 1 or not divisible[table.optimizer_index]:
            continue
        grads = table.grads(models, summed)
        if not grads or not all(map(_has_rows, grads)):
            continue
        if not fits_class(table.optimizer):
            continue
        step = RowStep.of(table.optimizer, group, table.weight)
        if step is not None:
            yield table, step, grads


def _tables(
    optimizers: Sequence[Optimizer], models: ReplicaModels
) -> Iterator[tuple[RowTable, dict[str, Any]]]:
    """Yields the tables of all optimizers, each with its group of today."""
    for i, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                index = models.tables.get(id(weight))
                if index is not None:
                    yield RowTable(weight, index, optimizer, i), group


def _has_rows(grad: torch.Tensor) -> bool:
    sparse = grad.layout == torch.sparse_coo
    return sparse and grad.sparse_dim() == 1 and grad.dense_dim() == 1


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
        few = sum(grad._nnz() for grad in grads) < DEAL_FROM_ROWS
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
