# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that save snapshots, and the models that they train."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_cpudist as cpudist

WIDTH = 4


class Drawing(nn.Module):
    """A dense network whose forward draws, and whose buffers move."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.first = nn.Linear(WIDTH, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.4)
        self.last = nn.Linear(6, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(torch.tanh(self.first(x))))).squeeze(1)


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Samples of one trainer's step."""
    return torch.randn(
        8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)
    )


def digest(model: nn.Module) -> dict[str, list[Any]]:
    """All values of a model, exact, as JSON can hold them."""
    return {
        name: value.double().flatten().tolist()
        for name, value in model.state_dict().items()
    }


def until(true: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Waits, at most so long."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def settle(opt: cpudist.DistributedOptimizer) -> None:
    """Waits until what a step has begun to save is there, or has failed."""
    snapshots = opt.snapshots
    if snapshots is None:
        return

    def settled() -> bool:
        snapshots.take_answers()
        return not snapshots.busy

    until(settled)


def dense_job(
    strategy: cpudist.Strategy, rank: int, steps: int, options: dict[str, Any] | None
) -> tuple[cpudist.DistributedOptimizer, nn.Module, Any]:
    """Trains up to a step, from where the newest snapshot is.

    ``options``: of ``resume``; ``None`` does without.
    """
    model = Drawing()
    inner = torch.optim.NAdam(model.parameters(), lr=0.05)
    opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 3, 0.8)
    torch.manual_seed(5 + rank)
    started = None
    if options is not None:
        started = opt.resume(state={"schedule": schedule}, **options)
    for step in range(started.step if started else 0, steps):
        opt.zero_grad()
        model(batch_of(step, rank)).square().mean().backward()
        opt.step()
        schedule.step()
        settle(opt)
    return opt, model, started


def dense_ranks(context: cpudist.Context, report: Any) -> Any:
    """What the trainers of a test run as processes; what to do is in ``CASE``."""
    torch.set_num_threads(1)
    case = json.loads(os.environ["CASE"])
    kind = {
        "allreduce": cpudist.AllReduce,
        "local_sgd": cpudist.LocalSGD,
        "reduce": cpudist.Reduce,
    }
    given = case.get("with", {})
    if "sharding" in given:
        given["sharding"] = cpudist.Sharding(**given["sharding"])
    strategy = kind[case["strategy"]](**given)
    options = case.get("resume")
    opt, model, started = dense_job(
        strategy, context.trainer_rank, case["steps"], options
    )
    name = None
    if case.get("save"):
        name = opt.save_snapshot(case["save"])
    found = digest(model)
    stats = opt.stats().get("snapshot")
    state = opt.state_dict()["state"]
    return {
        "model": found,
        "state": {
            f"{number} {part}": torch.as_tensor(value).double().flatten().tolist()
            for number, parts in state.items()
            for part, value in parts.items()
        },
        "step": started.step if started else 0,
        "name": name,
        "report": list(started.report) if started else [],
        "stats": stats,
    }
