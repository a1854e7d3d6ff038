# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model with remote tables, the same one with static ones, and how both train.

The static model's tables are filled, on trainer 0, with the rows that servers make for
the remote one's. Both train alike on the same batches, so that all is equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.tables.remote_weight import (
    become_local,
    is_remote,
    table_of,
)

ROWS, DIM, SLOTS = 40, 4, 3
STEPS = 12


class Model(nn.Module):
    """Two tables, one of them looked up by two modules, and a dense network."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=1)
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.last = nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=self.item.weight)
        self.last.weight = self.item.weight
        self.first = nn.Linear(DIM, 6)
        self.out = nn.Linear(6, 1)
        nn.init.uniform_(self.item.weight, -0.5, 0.5)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for layer in (self.first, self.out):
                for parameter in layer.parameters():
                    values = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(values * 0.5)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = self.item(ids[:, 0]) * self.item(ids[:, 1])
        flat = ids.reshape(-1)
        offsets = torch.arange(0, len(flat), ids.shape[1])
        last = self.last(flat, offsets, weights.reshape(-1))
        hidden = self.bag(ids) + rows + last
        return self.out(torch.tanh(self.first(hidden))).squeeze(1)


TABLES = {"bag.weight": "bag", "item.weight": "item"}


def remote_model(seed: int = 7, make: Callable[[], nn.Module] = Model) -> nn.Module:
    """The model with all its embeddings remote, of ``ROWS`` rows and more."""
    torch.manual_seed(seed)
    with cpudist.remote_tables(min_rows=ROWS):
        return make()


def initial_rows(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The rows that servers make for a remote table, all of them."""
    table = table_of(weight)
    spec = _core.TableSpec(
        name,
        table.rows,
        table.dim,
        remote=True,
        seed=table.seed_of(name),
        initial=table.program.steps,
        overrides=table.program.overrides,
    )
    keys = torch.arange(table.rows)
    made = torch.empty(table.rows, table.dim)
    _core.initial_rows(spec, keys.data_ptr(), len(keys), made.data_ptr())
    return made


def static_model(
    seed: int = 7, make: Callable[[], nn.Module] = Model, min_rows: int = ROWS
) -> nn.Module:
    """The same model with static tables, filled as the remote one's begin.

    Whatever else it draws is as the remote model's.
    """
    made = remote_model(seed, make)
    for name, parameter in made.named_parameters():
        if is_remote(parameter):
            table_of(parameter).values = initial_rows(name, parameter)
            become_local(parameter)
    return cpudist.shard_tables(made, min_rows=min_rows)


def rows_now(optimizer: cpudist.DistributedOptimizer) -> dict[str, torch.Tensor]:
    """Every row of every table as its servers have it."""
    found = {}
    for table in optimizer.trained.placement.tables:
        module, keys = table.found.modules[0], torch.arange(len(table.found.weight))
        with torch.no_grad():
            if isinstance(module, nn.EmbeddingBag):
                rows = module(keys, torch.arange(len(keys)))
            else:
                rows = module(keys)
        found[table.found.name] = rows.clone()
    return found


@dataclass
class Trained:
    """What a trainer has at the end."""

    losses: list[float]
    rows: dict[str, torch.Tensor]
    dense: dict[str, torch.Tensor]


@dataclass
class Case:
    """How a model is trained.

    Attributes:
        strategy: its own, per call.
        trainers, servers: of the run.
        optimizer: built over the model's parameters.
        sizes: samples of a trainer's batch, by step and rank.
        parts: backward passes of a step.
        ahead: batches that are prefetched.
        clip: of the optimizer.
        by_samples: steps are weighed.
        settled: every push is applied before the next lookup.
    """

    strategy: Callable[[], Any]
    trainers: int = 1
    servers: int = 0
    optimizer: Callable[..., Any] = field(
        default=lambda p: torch.optim.Adagrad(p, lr=0.1)
    )
    sizes: Callable[[int, int], int] = field(default=lambda step, rank: 5)
    parts: int = 1
    ahead: int = 0
    clip: Any = None
    by_samples: bool = False
    settled: bool = False

    def batches(self, rank: int) -> list[tuple[torch.Tensor, ...]]:
        """All batches of one trainer, parts of steps one after the other."""
        found = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(1000 * rank + step)
            for _ in range(self.parts):
                n = self.sizes(step, rank)
                ids = torch.randint(0, ROWS, (n, SLOTS), generator=generator)
                weights = torch.rand(n, SLOTS, generator=generator)
                found.append((ids, weights, torch.randn(n, generator=generator)))
        return found

    def train(self, models: list[nn.Module]) -> list[Trained]:
        """Trains one model per trainer."""

        def body(context: cpudist.Context) -> Trained:
            return self._train(models[context.trainer_rank], context.trainer_rank)

        return run(body, self.trainers, servers=self.servers)

    def _train(self, model: nn.Module, rank: int) -> Trained:
        made = cpudist.DistributedOptimizer(
            self.optimizer(model.parameters()), model, self.strategy(), clip=self.clip
        )
        batches = self.batches(rank)
        losses = []
        for step in range(STEPS):
            made.zero_grad()
            samples = 0
            for part in range(self.parts):
                at = step * self.parts + part
                for later in batches[at + 1 : at + 1 + self.ahead]:
                    made.prefetch({model.bag: later[0], model.item: later[0]})
                ids, weights, target = batches[at]
                samples += len(target)
                if len(target):
                    loss = (model(ids, weights) - target).square().mean()
                    loss.backward()
                    losses.append(float(loss))
            made.step(samples=samples if self.by_samples else None)
            if self.settled:
                made.flush("dense")
        made.flush("dense")  # static rows come by the lookups, too
        dense = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if name not in TABLES
        }
        return Trained(losses, rows_now(made), dense)


def assert_remote_equals_static(case: Case) -> None:
    """Both give the same losses, rows and dense parameters, to the bit."""
    # What trainers other than 0 begin with must not matter: they draw other seeds.
    remote = case.train([remote_model(7 + rank) for rank in range(case.trainers)])
    static = case.train([static_model(7 + rank) for rank in range(case.trainers)])
    for found, expected in zip(remote, static, strict=True):
        assert len(found.losses) > 0
        assert found.losses == expected.losses
        assert found.rows.keys() == expected.rows.keys() == TABLES.keys()
        for name, rows in expected.rows.items():
            assert torch.equal(found.rows[name], rows), name
        for name, value in expected.dense.items():
            assert torch.equal(found.dense[name], value), name


def remote(make: Callable[[], Any]) -> Any:
    """What ``make`` builds, with embeddings of ``ROWS`` rows remote."""
    torch.manual_seed(3)
    with cpudist.remote_tables(min_rows=ROWS):
        return make()


def remote_embedding(**options: Any) -> nn.Embedding:
    """A remote table by itself."""
    return remote(lambda: nn.Embedding(ROWS, DIM, **options))


def wrap(
    model: nn.Module, strategy: Any = None, optimizer: Any = None
) -> cpudist.DistributedOptimizer:
    """The model's optimizer, by default SGD with a rate of 1."""
    made = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    return cpudist.DistributedOptimizer(made, model, strategy)


class Ranking(nn.Module):
    """Both kinds of tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.slots = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=1)
        self.fc = nn.Linear(DIM, 2)
        with torch.no_grad():
            for parameter in self.fc.parameters():
                parameter.fill_(0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.tanh(self.word(ids[:, 0]) + self.slots(ids)))
