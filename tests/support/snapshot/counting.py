# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model whose values say how many steps of each trainer were applied."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import torch_cpudist as cpudist

ROWS = 4


class Counting(nn.Module):
    """Row ``r`` and element ``r`` of ``dense`` count the steps of trainer ``r``.

    Args:
        kind: ``"static"`` or ``"remote"``, of its table; ``"dense"``: it has none.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        remote = kind == "remote"
        made = cpudist.remote_tables(min_rows=1) if remote else contextlib.nullcontext()
        self.table: nn.Embedding | None = None
        if kind != "dense":
            with made:
                self.table = nn.Embedding(ROWS, 2, sparse=True)
            nn.init.zeros_(self.table.weight)
        self.dense = nn.Parameter(torch.zeros(ROWS))

    def forward(self, rank: int) -> torch.Tensor:
        """The loss of a trainer: its gradients are ones."""
        loss = -self.dense[rank]
        if self.table is not None:
            loss = loss - self.table(torch.tensor([rank])).sum()
        return loss


def wrapped(
    kind: str, strategy: str = "async"
) -> tuple[Counting, cpudist.DistributedOptimizer]:
    """One with SGD of rate 1."""
    model = Counting(kind)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def step(opt: cpudist.DistributedOptimizer, model: Counting, rank: int) -> None:
    """One step of one trainer."""
    opt.zero_grad()
    model(rank).backward()
    opt.step()


def counted(opt: cpudist.DistributedOptimizer, model: Counting) -> list[list[int]]:
    """How many of each trainer the servers have, by each kind of parameter."""
    opt.flush("dense")
    with torch.no_grad():
        found = [[int(n) for n in model.dense]]
        if model.table is not None:
            rows = model.table(torch.arange(ROWS))
            assert torch.equal(rows[:, 0], rows[:, 1])
            found.append([int(n) for n in rows[:, 0]])
    return found
