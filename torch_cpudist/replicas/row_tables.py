# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which tables of a model replicas step by row, without torch's sparse operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist import ops
from torch_cpudist.replicas import row_steps as rules
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.replicas.row_steps import RowStep


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
        if not rules.fits_class(table.optimizer):
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
