# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model whose gradients are whole numbers that do not depend on its weights.

With SGD and lr 1 the final weights are the initial ones less the sum of all gradients,
exactly, in any order of updates.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist

ROWS, DIM, WIDTH = 40, 3, 50


class Counting(nn.Module):
    """A table and a dense vector that is cut into several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.dense = nn.Parameter(torch.arange(float(WIDTH)))
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(float(ROWS * DIM)).view(ROWS, DIM))


def gradient_of(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids with repeats, their gradient rows and the dense gradient of one step."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (6,), generator=generator)
    rows = torch.randint(-8, 8, (6, DIM), generator=generator).float()
    dense = torch.randint(-8, 8, (WIDTH,), generator=generator).float()
    return ids, rows, dense


def backward(model: Counting, seed: int) -> None:
    ids, rows, dense = gradient_of(seed)
    ((model.table(ids) * rows).sum() + (model.dense * dense).sum()).backward()


def model_sum(seeds: list[int]) -> dict[str, torch.Tensor]:
    """What SGD with lr 1 makes of the model with the gradients of these steps."""
    model = Counting()
    with torch.no_grad():
        for seed in seeds:
            ids, rows, dense = gradient_of(seed)
            model.table.weight.index_add_(0, ids, -rows)
            model.dense -= dense
    return dict(model.state_dict())


def wrapped(
    model: nn.Module, strategy: Any, lr: float = 1.0, **options: Any
) -> cpudist.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return cpudist.DistributedOptimizer(inner, model, strategy=strategy, **options)


def asynchronous(queue: dict[str, Any], **options: Any) -> cpudist.Async:
    sharding = cpudist.Sharding(min_block_size=8)
    return cpudist.Async(sharding=sharding, communicator=queue, **options)


def seeds_of(rank: int, steps: int) -> list[int]:
    return [1000 * rank + step for step in range(steps)]


def train_counts(
    trainers: int,
    servers: int,
    queue: dict[str, Any],
    *,
    steps: int = 30,
    early: bool = False,
    network: Any = None,
    variables: dict[str, str] | None = None,
    pauses: bool = True,
    **options: Any,
) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """Trains; every trainer's final weights and stats.

    Args:
        early: trainer r makes only ``steps // (r + 1)`` steps.
        pauses: trainers pause at random, so that they interleave.
    """

    def body(context: cpudist.Context) -> Any:
        model = Counting()
        optimizer = wrapped(model, asynchronous(queue, **options))
        rank = context.trainer_rank
        chance = random.Random(rank)
        for seed in seeds_of(rank, steps // (rank + 1) if early else steps):
            if pauses and chance.random() < 0.3:
                time.sleep(chance.random() * 0.002)
            optimizer.zero_grad()
            backward(model, seed)
            optimizer.step()
        optimizer.leave()
        context.barrier()
        optimizer.flush()
        found = {name: value.clone() for name, value in model.state_dict().items()}
        return found, optimizer.stats()

    return run(body, trainers, servers, network=network, variables=variables)


def all_seeds(trainers: int, steps: int, early: bool = False) -> list[int]:
    return [
        seed
        for rank in range(trainers)
        for seed in seeds_of(rank, steps // (rank + 1) if early else steps)
    ]


def alone(body: Callable[[cpudist.Context], Any], **options: Any) -> Any:
    return run(body, 1, **options)[0]
