# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models of several tables, trained with and without foreseeing their lookups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sync_cases import assert_same_bits, copy_of, run
from torch import nn

import torch_cpudist as cpudist

TABLES, ROWS, DIM, BATCH, STEPS = 6, 40, 2, 16, 8
# Forwards that are watched before the first one is foreseen.
WATCHED = 3


def tables(count: int = TABLES) -> nn.ModuleList:
    made = [nn.Embedding(ROWS, DIM, sparse=True) for _ in range(count)]
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for table in made:
            table.weight.copy_(torch.randn(ROWS, DIM, generator=generator))
    return nn.ModuleList(made)


class Columns(nn.Module):
    """Each table is looked up with a column of the only input."""

    def __init__(self, count: int = TABLES) -> None:
        super().__init__()
        self.tables = tables(count)

    def columns(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [ids[:, i] for i in range(len(self.tables))]

    def forward(self, ids: Any) -> torch.Tensor:
        columns = self.columns(ids)
        found = [t(c) for t, c in zip(self.tables, columns, strict=True)]
        return torch.tanh(torch.stack(found)).sum((0, -1)).flatten()


class Cast(Columns):
    """As deepctr-torch: one matrix of floats, slices of which are cast."""

    def columns(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [ids[:, i : i + 1].long() for i in range(len(self.tables))]


class Computed(Columns):
    """Ids that are in no input."""

    def columns(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [(ids[:, i] * 7 + i) % ROWS for i in range(len(self.tables))]


def batches_of(
    rank: int,
    steps: int = STEPS,
    count: int = TABLES,
    size: Callable[[int, int], int] = lambda step, rank: BATCH,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        torch.randint(ROWS, (size(step, rank), count), generator=generator)
        for step in range(steps)
    ]


@dataclass
class Trained:
    """What a rank has at the end.

    Attributes:
        state: of the model, flushed.
        requests: of each step.
        stats: of the optimizer after the last step.
    """

    state: dict[str, torch.Tensor]
    requests: list[int]
    stats: dict[str, Any]

    @property
    def lookups(self) -> dict[str, int]:
        found: dict[str, int] = self.stats["lookups"]
        return found


Step = Callable[[nn.Module, Any, torch.Tensor], None]


def one_step(model: nn.Module, opt: Any, batch: Any) -> None:
    opt.zero_grad()
    model(batch).square().sum().backward()
    opt.step()


def train(
    learn: bool,
    make: Callable[[], nn.Module] = Columns,
    trainers: int = 1,
    servers: int = 1,
    *,
    strategy: Any = cpudist.Sync,
    batches: Callable[[int], Sequence[Any]] = batches_of,
    step: Step = one_step,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> list[Trained]:
    """What every trainer has after its batches."""

    def body(context: cpudist.Context) -> Trained:
        model = make()
        chosen = strategy(communicator={"learn_lookups": learn}, **(options or {}))
        inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=chosen)
        requests = []
        for batch in batches(context.trainer_rank):
            before = opt.stats()["requests"]
            step(model, opt, batch)
            requests.append(opt.stats()["requests"] - before)
        stats = opt.stats()
        opt.leave()
        context.barrier()
        opt.flush()
        return Trained(copy_of(model), requests, stats)

    return run(body, trainers, servers, **others)


def both(*arguments: Any, **options: Any) -> list[Trained]:
    """Trains with and without; checks that bits are the same; returns those with."""
    plain = train(False, *arguments, **options)
    found = train(True, *arguments, **options)
    for one, other in zip(plain, found, strict=True):
        assert_same_bits(one.state, other.state)
        assert one.lookups == {"together": 0, "tables": 0, "alone": 0, "in_vain": 0}
    return found
