# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs whose tables have other names, kinds and numbers of servers from run to run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from snapshot_parity import SMALL, seeing
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist

ROWS, DIM = 200, 4
ADAGRAD, ADAM = "adagrad", "adam"
# Ranks that are threads draw from one generator.
_drawing = threading.Lock()
_RULES: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    ADAGRAD: lambda p: torch.optim.Adagrad(p, lr=0.1),
    ADAM: lambda p: torch.optim.Adam(p, lr=0.02),
}


class Tables(nn.Module):
    """Tables of these names, summed up, and a dense network ``dense``."""

    def __init__(
        self, names: Mapping[str, int], dense: str, dim: int, sparse: bool
    ) -> None:
        super().__init__()
        for name, rows in names.items():
            table = nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse)
            self.add_module(name, table)
        self.table_names = tuple(names)
        self.add_module(dense, nn.Linear(dim, 1))
        self.dense_name = dense

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = [self.get_submodule(name)(ids) for name in self.table_names]
        out: torch.Tensor = self.get_submodule(self.dense_name)(sum(found))
        return out


@dataclass(frozen=True)
class Setup:
    """What is trained, by how many; with how it begins."""

    tables: Mapping[str, int] = field(default_factory=lambda: {"a": ROWS, "b": ROWS})
    dense: str = "top"
    remote: bool = False
    servers: int = 2
    trainers: int = 2
    rule: str = ADAGRAD
    average: float = 0.0
    seed: int = 1
    dim: int = DIM
    sparse: bool = True
    strategy: Callable[[], cpudist.Strategy] = lambda: cpudist.Sync(sharding=SMALL)

    def model(self) -> Tables:
        """Made; rows begin by chance."""
        made = cpudist.remote_tables(min_rows=1)
        with _drawing, made if self.remote else contextlib.nullcontext():
            torch.manual_seed(self.seed)
            return Tables(self.tables, self.dense, self.dim, self.sparse)


class Job:
    """One trainer of it."""

    def __init__(self, setup: Setup, context: cpudist.Context) -> None:
        self.rank = context.trainer_rank
        self.model = setup.model()
        self.inner = _RULES[setup.rule](self.model.parameters())
        self.opt = cpudist.DistributedOptimizer(
            self.inner,
            self.model,
            strategy=setup.strategy(),
            average=cpudist.EMA(setup.average) if setup.average else None,
        )

    def train(self, first: int, last: int) -> None:
        """Steps of which each touches some rows of the lower half."""
        for step in range(first, last):
            made = torch.Generator().manual_seed(100 * step + self.rank)
            ids = torch.randint(0, ROWS // 2, (6, 3), generator=made)
            self.opt.zero_grad()
            self.model(ids).square().mean().backward()
            self.opt.step()

    def rows(self, name: str) -> torch.Tensor:
        """All rows of a table."""
        table = self.model.get_submodule(name)
        keys = torch.arange(self.model.get_submodule(name).num_embeddings)
        with torch.no_grad():
            found: torch.Tensor = table(keys.unsqueeze(1))
        return found.clone()

    def values(self) -> dict[str, torch.Tensor]:
        """All rows and dense parameters, by names in ``state_dict()``."""
        found = {f"{name}.weight": self.rows(name) for name in self.model.table_names}
        dense = self.model.get_submodule(self.model.dense_name)
        for name, parameter in dense.named_parameters():
            found[f"{self.model.dense_name}.{name}"] = parameter.detach().clone()
        return found

    def averages(self) -> dict[str, torch.Tensor]:
        """The same of averages."""
        with self.opt.averaged():
            return self.values()

    def state(self, name: str, part: str) -> torch.Tensor:
        """A part of the optimizer's state of a parameter, of all rows."""
        index = [n for n, _ in self.model.named_parameters()].index(name)
        state = self.opt.state_dict()["state"][index]
        return torch.as_tensor(state[part]).clone()


def ranks(setup: Setup, folder: Any, body: Callable[[Job], Any]) -> list[Any]:
    """What ``body`` returns on every trainer."""

    def one(context: cpudist.Context) -> Any:
        return body(Job(setup, context))

    return run(one, setup.trainers, servers=setup.servers, variables=seeing(folder))


def saved(setup: Setup, folder: Any, steps: int = 6, name: str = "here") -> Any:
    """Trains and saves; what every trainer had then: values, averages."""

    def body(job: Job) -> Any:
        job.opt.resume(folder)
        job.train(0, steps)
        job.opt.save_snapshot(name)
        found = job.values()
        return found, job.averages() if setup.average else {}

    return ranks(setup, folder, body)[0]


def same(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> bool:
    """Whether all are, to the bit."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


def there(folder: Path) -> set[str]:
    """What is in a directory of snapshots, but for what trainers leave who leave."""
    names = (path.name for path in folder.iterdir())
    return {name for name in names if not name.startswith("left_")}
