# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``delay``: what delay compensation makes of gradients that are 16 updates late.

17 trainers, threads of this process, take turns, so that every gradient is exactly 16
updates late and the result is the same in every run. They fit a line in 10 dimensions
by SGD to planted data with noise; ``--lr`` and ``--seconds`` have no effect. Rows are
strategies and learning rates; ``loss`` is the mean of five seeds over all samples
after the last update, ``ratio`` that to plain Async's at the same learning rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from report import Row

import torch_cpudist as cpudist
from torch_cpudist.testing import Turns, run_ranks

TRAINERS = 17
STEPS = 30 * TRAINERS
SEEDS = range(5)
SAMPLES, FEATURES, BATCH = 1024, 10, 2
LR = 0.06
PLAIN = cpudist.Async()
CONSTANT = cpudist.Async(delay_compensation={"factor": 0.3})
ADAPTIVE = cpudist.Async(delay_compensation={"factor": 1.0, "adaptive": True})
STRATEGIES = {
    "Async": PLAIN,
    f"max_staleness={TRAINERS - 1}": cpudist.Async(max_staleness=TRAINERS - 1),
    "DC constant": CONSTANT,
    "DC adaptive": ADAPTIVE,
}
LEARNING_RATES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, LR)
COLUMNS = {
    "name": "strategy",
    "lr": "lr",
    "loss": "loss",
    "ratio": "ratio",
    **{f"loss_{seed}": f"seed {seed}" for seed in SEEDS},
}


class _Problem:
    """Least squares with planted weights; noise makes the best loss about 0.5."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(SAMPLES, FEATURES, generator=generator)
        planted = torch.randn(FEATURES, generator=generator)
        noise = torch.randn(SAMPLES, generator=generator)
        self.y = self.x @ planted + noise
        self.batches = torch.randint(SAMPLES, (STEPS, BATCH), generator=generator)

    def gradient(self, weight: torch.Tensor, step: int) -> torch.Tensor:
        x, y = self.x[self.batches[step]], self.y[self.batches[step]]
        return x.T @ (x @ weight - y) / BATCH

    def loss(self, weight: torch.Tensor) -> float:
        return float((self.x @ weight - self.y).square().mean() / 2)


def _train(
    context: cpudist.Context, turns: Turns, seed: int, lr: float, strategy: Any
) -> float:
    problem = _Problem(seed)
    model = torch.nn.Linear(FEATURES, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = cpudist.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model, strategy=strategy
    )

    def turn(position: int) -> None:
        step = position - TRAINERS
        if step < 0:
            return  # before the first update everybody is here
        weight = model.weight.detach()
        model.weight.grad = problem.gradient(weight[0], step)[None]
        optimizer.step()
        optimizer.flush(pull="dense")

    turns.take(context.trainer_rank, turn)
    context.barrier()  # until the last turn of all
    optimizer.flush(pull="dense")
    late = optimizer.stats()["staleness"]["steps_max"]
    if late != TRAINERS - 1:
        raise RuntimeError(f"a gradient was {late} updates late, not {TRAINERS - 1}")
    return problem.loss(model.weight.detach()[0])


def losses(cells: Sequence[tuple[Any, float]]) -> list[list[float]]:
    """Final losses by seed, for each pair of a strategy and a learning rate."""
    runs = [(seed, strategy, lr) for strategy, lr in cells for seed in SEEDS]
    schedule = [turn % TRAINERS for turn in range(TRAINERS + STEPS)]
    turns = [Turns(schedule) for _ in runs]

    def body(context: cpudist.Context) -> list[float]:
        found = []
        for (seed, strategy, lr), own in zip(runs, turns, strict=True):
            found.append(_train(context, own, seed, lr, strategy))
        return found

    variables = {"CPUDIST_THREADS": "1"}
    found = run_ranks(body, TRAINERS, servers=1, timeout_s=600.0, variables=variables)[
        0
    ]
    return [
        found[begin : begin + len(SEEDS)] for begin in range(0, len(runs), len(SEEDS))
    ]


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields a row per strategy and learning rate."""
    del args
    for lr in LEARNING_RATES:
        found = losses([(strategy, lr) for strategy in STRATEGIES.values()])
        plain = sum(found[0]) / len(SEEDS)
        for name, by_seed in zip(STRATEGIES, found, strict=True):
            mean = sum(by_seed) / len(SEEDS)
            yield {
                "case": "delay",
                "name": name,
                "lr": lr,
                "trainers": TRAINERS,
                "loss": mean,
                "ratio": mean / plain,
                **{f"loss_{seed}": by_seed[seed] for seed in SEEDS},
            }
