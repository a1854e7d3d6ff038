# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``staleness``: what a bound on staleness costs beside one slow trainer.

Trainers push small gradients to one server; their compute is a sleep, ten times as
long on the last one. Rows are bounds (``max_staleness``). The age of every push is
measured, so that one above the bound would show in the largest. ``fast steps/s`` is the
mean rate of the other trainers; its ratio is to the row without a bound.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from report import Row

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

COLUMNS = {
    "name": "max_staleness",
    "trainers": "trainers",
    "pushes": "pushes",
    "within": "within",
    "steps_mean": "age mean",
    "steps_max": "age max",
    "fast_steps_per_s": "fast steps/s",
    "ratio": "ratio",
    "slow_steps_per_s": "slow steps/s",
}
COMPUTE_S = 0.002
SLOWER = 10
ELEMENTS = 256
_SECONDS = "STALENESS_BENCHMARK_SECONDS"


def _train(context: cpudist.Context, report: Any) -> dict[str, float]:
    slow = context.trainer_rank == context.trainer_count - 1
    seconds = float(os.environ[_SECONDS])
    model = torch.nn.Linear(ELEMENTS, 1, bias=False)
    optimizer = cpudist.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model, strategy="async"
    )
    model.weight.grad = torch.ones_like(model.weight)
    context.barrier()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        time.sleep(COMPUTE_S * (SLOWER if slow else 1))
        optimizer.step()
        steps += 1
    rate = steps / (time.perf_counter() - began)
    optimizer.leave()
    found = optimizer.stats()["staleness"]
    return {
        "rate": rate,
        "pushes": found["pushes"],
        "mean": found["steps_mean"],
        "max": found["steps_max"],
    }


def _row(bound: int | None, args: argparse.Namespace) -> Row:
    variables = {_SECONDS: str(args.seconds), "CPUDIST_THREADS": "1"}
    if bound is not None:
        variables["CPUDIST_ASYNC_MAX_STALENESS"] = str(bound)
    ranks = ProcessRanks(_train, args.trainers + 1, servers=1, variables=variables)
    with ranks:
        found = ranks.results(args.seconds + args.deadline_s)[1:]
    fast = [one["rate"] for one in found[:-1]]
    oldest = max(one["max"] for one in found)
    pushes = sum(one["pushes"] for one in found)
    return {
        "case": "staleness",
        "name": "none" if bound is None else str(bound),
        "trainers": args.trainers,
        "pushes": pushes,
        "within": "yes" if bound is None or oldest <= bound else "NO",
        "steps_mean": sum(one["mean"] * one["pushes"] for one in found) / pushes,
        "steps_max": oldest,
        "fast_steps_per_s": sum(fast) / len(fast),
        "slow_steps_per_s": found[-1]["rate"],
    }


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields a row per bound: none, ample, what the slow trainer needs, the least."""
    if args.trainers < 2:
        raise SystemExit("staleness: expected --trainers of at least 2")
    others = args.trainers - 1
    reference = 0.0
    for bound in (None, 100 * others, 2 * SLOWER * others, others):
        row = _row(bound, args)
        reference = reference or row["fast_steps_per_s"]
        yield {**row, "ratio": row["fast_steps_per_s"] / reference}
