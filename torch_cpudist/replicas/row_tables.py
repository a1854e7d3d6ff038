# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which tables of a model replicas step by row, without torch's sparse operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist import ops
from torch_cpudist.replicas import row_steps as rules
from torch_cpudist.replicas.likeness import steps_by_parameter
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


def tables_of(optimizers: Sequence[Optimizer], models: ReplicaModels) -> list[RowTable]:
    """Tables whose optimizer can step them by row."""
    sparse = models.sparse_weights()
    index_of = {id(parameter): i for i, parameter in enumerate(models.parameters)}
    return [
        RowTable(weight, index_of[id(weight)], optimizer, i)
        for i, optimizer in enumerate(optimizers)
        if rules.fits_class(optimizer)
        for group in optimizer.param_groups
        for weight in group["params"]
        if id(weight) in sparse
    ]


def row_steps(
    tables: Sequence[RowTable], models: ReplicaModels, summed: bool
) -> Iterator[tuple[RowTable, RowStep, list[torch.Tensor]]]:
    """Yields the tables that are stepped by row in this step, how, and by what.

    The same for replicas that share a table as for those that have copies.

    Args:
        tables: of ``tables_of``.
        models: have the gradients.
        summed: whether they are in the model by now; else they are the replicas'.
    """
    for table in tables:
        grads = table.grads(models, summed)
        if not grads or not all(map(_has_rows, grads)):
            continue
        if not steps_by_parameter(table.optimizer):
            continue
        group = next(
            group
            for group in table.optimizer.param_groups
            if any(parameter is table.weight for parameter in group["params"])
        )
        step = RowStep.of(table.optimizer, group, table.weight)
        if step is not None:
            yield table, step, grads


def _has_rows(grad: torch.Tensor) -> bool:
    sparse = grad.layout == torch.sparse_coo
    return sparse and grad.sparse_dim() == 1 and grad.dense_dim() == 1
