# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models whose values say exactly which gradients they have.

Gradients are whole numbers and the rule is SGD with lr 1.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

ROWS, DIM, DENSE = 12, 2, 6


class Whole(nn.Module):
    """Its gradients are what it is told to have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.dense = nn.Parameter(torch.zeros(DENSE))
        nn.init.zeros_(self.table.weight)


def model_of(remote: bool) -> Whole:
    """One whose table is remote or not."""
    if not remote:
        return Whole()
    with cpudist.remote_tables(min_rows=1):
        return Whole()


def gradients(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, their gradient, and the dense gradient of one trainer's step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randperm(ROWS, generator=generator)[:4]
    of_rows = torch.randint(-4, 5, (4, DIM), generator=generator).float()
    of_dense = torch.randint(-4, 5, (DENSE,), generator=generator).float()
    return ids, of_rows, of_dense


def push(opt: cpudist.DistributedOptimizer, model: Whole, rank: int, step: int) -> None:
    """One step of one trainer."""
    ids, of_rows, of_dense = gradients(rank, step)
    opt.zero_grad()
    loss = (model.table(ids) * of_rows).sum() + (model.dense * of_dense).sum()
    loss.backward()
    opt.step()


class Pushing:
    """A trainer that pushes its gradients step by step, and notes their rounds."""

    def __init__(
        self,
        opt: cpudist.DistributedOptimizer,
        model: Whole,
        rank: int,
        rounds: Rounds,
        made: int = 0,
    ) -> None:
        """Goes on after ``made`` steps."""
        self.opt, self.model, self.rank = opt, model, rank
        self.rounds, self.made = rounds, made

    def step(self, again: bool = False) -> None:
        """The next one; ``again``: with the gradients that are there."""
        if again:
            self.opt.step()
        else:
            push(self.opt, self.model, self.rank, self.made)
        self.rounds.note(self.opt.rounds, self.rank, self.made)
        self.made += 1


def expected(
    counts: Sequence[int], shares: Sequence[float] = (1.0, 1.0, 1.0)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values after so many steps of each trainer, by its share in the mean."""
    table, dense = torch.zeros(ROWS, DIM), torch.zeros(DENSE)
    for rank, count in enumerate(counts):
        for step in range(count):
            ids, of_rows, of_dense = gradients(rank, step)
            table.index_add_(0, ids, -of_rows * shares[rank])
            dense -= of_dense * shares[rank]
    return table, dense


def saved_values(snapshot: Snapshot) -> tuple[torch.Tensor, torch.Tensor]:
    """The table and the dense parameter as a snapshot has them."""
    found = snapshot.rows("table.weight", torch.arange(ROWS).numpy())
    weight = torch.from_numpy(found.columns["weight"].copy())
    return weight, torch.from_numpy(snapshot.dense("dense").copy())


def check_files(
    folder: Path,
    scale: float,
    shares: Sequence[float] = (1.0, 1.0, 1.0),
    atol: float = 0.0,
) -> int:
    """Every snapshot is of whole steps of each trainer; returns how many there are.

    ``atol``: that values may be off by. A step that is missing is a whole number; under
    Geo a trainer of two hands on halves of halves, which rounds after many exchanges.
    """
    names = Directory(folder).names()
    for name in names:
        snapshot = Snapshot(folder / name)
        assert snapshot.verify() == []
        counts = [one.steps for one in snapshot.manifest.trainers]
        table, dense = expected(counts, shares)
        weight, values = saved_values(snapshot)
        for found, whole in ((weight * scale, table), (values * scale, dense)):
            assert (found - whole).abs().max() <= atol, (name, counts)
    return len(names)


@dataclass
class Rounds:
    """Which steps of which trainers made which round, for means of those there."""

    made: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def note(self, number: int, rank: int, step: int) -> None:
        """A step of a trainer was part of a round."""
        with self.lock:
            self.made.setdefault(number, []).append((rank, step))

    def expected(self, last: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Values after a round, and how many steps each trainer had made.

        A round has a number also where nobody was there.
        """
        table, dense, counts = torch.zeros(ROWS, DIM), torch.zeros(DENSE), [0, 0, 0]
        for number in range(1, last + 1):
            made = self.made.get(number, [])
            for rank, step in made:
                ids, of_rows, of_dense = gradients(rank, step)
                table.index_add_(0, ids, -of_rows / len(made))
                dense -= of_dense / len(made)
                counts[rank] = step + 1
        return table, dense, counts
