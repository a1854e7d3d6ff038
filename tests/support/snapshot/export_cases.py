# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model with every kind of table and parameter, trained in ranks of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist

LARGE, SMALL, DIM = 100_000, 40, 4


class Net(nn.Module):
    """Two tables that may be remote, one of them of bags, and one that is static."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(LARGE, DIM, padding_idx=0, sparse=True)
        self.tags = nn.EmbeddingBag(LARGE, DIM, mode="mean", sparse=True)
        self.days = nn.Embedding(SMALL, DIM, sparse=True)
        self.norm = nn.BatchNorm1d(3 * DIM)
        self.drop = nn.Dropout(0.3)
        self.top = nn.Linear(3 * DIM, 1)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(
        self, users: torch.Tensor, tags: torch.Tensor, days: torch.Tensor
    ) -> torch.Tensor:
        found = [self.users(users), self.tags(tags), self.days(days)]
        joined = self.drop(self.norm(torch.cat(found, 1)))
        return self.top(joined).squeeze(1) * self.scale


def net(remote: bool = True, seed: int = 1) -> Net:
    """A model that begins alike for one seed."""
    torch.manual_seed(seed)
    context: Any = contextlib.nullcontext()
    if remote:
        context = cpudist.remote_tables(min_rows=LARGE)
    with context:
        model = Net()
    if not remote:
        return model
    nn.init.normal_(model.tags.weight, std=0.5)
    return model


def batch(step: int, rank: int = 0, size: int = 16) -> tuple[torch.Tensor, ...]:
    """Ids of a step; ``step`` -1: those of an evaluation, of which few were trained."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 7)
    limit = LARGE if step < 0 else 50
    users = torch.randint(0, limit, (size,), generator=generator)
    if step < 0:
        users[:8] = torch.arange(8)
    tags = torch.randint(0, limit, (size, 3), generator=generator)
    days = torch.randint(0, SMALL, (size,), generator=generator)
    return users, tags, days


def step(opt: cpudist.DistributedOptimizer, model: Net, number: int, rank: int) -> None:
    """One training step."""
    opt.zero_grad()
    model(*batch(number, rank)).square().mean().backward()
    opt.step()


def evaluated(model: Net, size: int = 64) -> torch.Tensor:
    """What the model says of rows that were trained and of others."""
    was = model.training
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(*batch(-1, size=size))
    model.train(was)
    return found.clone()


def trained(
    body: Callable[[cpudist.DistributedOptimizer, Net, int], Any],
    folder: Any = None,
    *,
    strategy: cpudist.Strategy | None = None,
    remote: bool = True,
    average: float = 0.0,
    steps: int = 6,
    trainers: int = 2,
    servers: int = 0,
) -> list[Any]:
    """What ``body(opt, model, rank)`` returns on every trainer, after some steps."""

    def one(context: cpudist.Context) -> Any:
        model = net(remote)
        opt = cpudist.DistributedOptimizer(
            torch.optim.Adagrad(model.parameters(), lr=0.1),
            model,
            strategy=strategy or cpudist.Sync(),
            average=cpudist.EMA(average) if average else None,
        )
        rank = context.trainer_rank
        if folder is not None:
            opt.resume(folder)
        torch.manual_seed(rank)
        for number in range(steps):
            step(opt, model, number, rank)
        return body(opt, model, rank)

    variables = {"CPUDIST_SNAPSHOT_DIR": str(folder)} if folder else {}
    return run(one, trainers, servers=servers, variables=variables)
