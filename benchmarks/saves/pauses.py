# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``pauses``: what each of several trainers notices of a snapshot, by strategy.

``--trainers`` processes and ``--servers`` of servers (0: trainers have them) train a
table of ``--table-rows`` rows and a small network with row-wise Adagrad and Adagrad for
``--steps`` steps each, on ids of their own, and save ten times meanwhile. A step is
beside a save if it overlaps the time from the step of trainer 0 in which that began
until it was committed. Figures are of the steps of all trainers together: the slowest
of them is in the last columns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from cases.rows import zipf_batches
from report import Row
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

COLUMNS = {
    "name": "name",
    "trainers": "trainers",
    "count": "count",
    "median_ms": "median ms",
    "p99_ms": "p99 ms",
    "p999_ms": "p99.9 ms",
    "worst_ms": "worst ms",
    "saves": "saves",
    "save_s": "save s",
    "pause_ms": "longest mark ms",
    "verified": "verified",
}
STEPS = 4000
SAVES = 10
BATCHES = 64
WIDTH = 32
# What p99.9 of steps may grow by.
PAUSE_LIMIT_MS = 100.0
# A mark that other trainers answer at their next step is given up after the last.
LAST_SAVE_LIMIT_S = 5.0
STRATEGIES = {
    "sync": cpudist.Sync,
    "half_async": cpudist.HalfAsync,  # one group, as all are of one host
    "async": cpudist.Async,
    "geo": lambda: cpudist.Geo(push_every=20),
    "geo_outer": lambda: cpudist.Geo(
        push_every=20, outer=cpudist.Outer(lr=0.7, momentum=0.9, nesterov=True)
    ),
    "allreduce": cpudist.AllReduce,
    "hybrid": cpudist.Hybrid,
}
_PREFIX = "PAUSES_BENCHMARK_"


class Net(nn.Module):
    """A table, and a network over the mean of a sample's rows."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(rows, dim, mode="mean", sparse=True)
        self.network = nn.Sequential(
            nn.Linear(dim, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(self.table(ids))
        return found


def _number(name: str) -> int:
    return int(os.environ[_PREFIX + name])


def _over(counts: dict[str, Any]) -> int:
    """How many saves have ended, on trainer 0; others do not see that."""
    return int(counts["saved"] + counts["failed"] + counts["skipped"])


def _train(context: cpudist.Context, report: Any) -> dict[str, Any]:
    """Times of every step and, on trainer 0, of every save."""
    rows, steps, batch = _number("ROWS"), _number("STEPS"), _number("BATCH")
    torch.manual_seed(1)
    model = Net(rows, _number("DIM"))
    tables, others = [model.table.weight], list(model.network.parameters())
    inners = [
        cpudist.optim.RowWiseAdagrad(tables, lr=0.01),
        torch.optim.Adagrad(others, lr=0.01),
    ]
    strategy = STRATEGIES[os.environ[_PREFIX + "STRATEGY"]]()
    opt = cpudist.DistributedOptimizer(inners, model, strategy=strategy)
    every = max(steps // SAVES, 1)
    opt.resume(os.environ["CPUDIST_SNAPSHOT_DIR"], every_steps=every, keep=1)
    batches = [
        ids[: len(ids) // batch * batch].view(batch, -1)
        for ids in zipf_batches(rows, BATCHES, seed=1 + context.trainer_rank)
    ]
    context.barrier()
    took: list[tuple[float, float]] = []
    saves: list[tuple[float, float]] = []
    begun, due = None, 0
    for step in range(steps):
        began = time.monotonic()
        opt.zero_grad()
        model(batches[step % BATCHES]).square().mean().backward()
        opt.step()
        took.append((began, time.monotonic()))
        if (step + 1) % every == 0:
            begun = begun or began
            due += 1
        if begun is not None and _over(opt.stats()["snapshot"]) >= due:
            saves.append((begun, time.monotonic()))
            begun = None
    context.barrier()
    if begun is not None:  # a short run ends before its save does
        until = time.monotonic() + LAST_SAVE_LIMIT_S
        while _over(opt.stats()["snapshot"]) < due and time.monotonic() < until:
            time.sleep(0.001)
        saves.append((begun, time.monotonic()))
    context.barrier()
    counts = opt.stats()["snapshot"]
    return {"steps": took, "saves": saves, "counts": counts}


def _beside(steps: Sequence[Sequence[float]], saves: Sequence[Sequence[float]]) -> Any:
    """The seconds of steps without and beside a save; those do not overlap."""
    ends = [end for _, end in saves]
    quiet, beside = [], []
    for began, ended in steps:
        at = bisect_left(ends, began)
        overlaps = at < len(saves) and saves[at][0] <= ended
        (beside if overlaps else quiet).append(ended - began)
    return quiet, beside


def _row(name: str, trainers: int, took_s: list[float]) -> Row:
    ordered = sorted(took_s)

    def at(share: float) -> float:
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "case": "pauses",
        "name": name,
        "trainers": trainers,
        "count": len(ordered),
        "median_ms": at(0.5),
        "p99_ms": at(0.99),
        "p999_ms": at(0.999),
        "worst_ms": 1e3 * ordered[-1],
    }


def figures(strategy: str, found: Sequence[dict[str, Any]]) -> Iterable[Row]:
    """The rows of one strategy; the second is judged."""
    saves = found[0]["saves"]
    quiet: list[float] = []
    beside: list[float] = []
    for one in found:
        without, with_one = _beside(one["steps"], saves)
        quiet += without
        beside += with_one
    if not quiet or not beside:
        raise RuntimeError(
            f"pauses: {len(quiet)} steps without and {len(beside)} beside a save of "
            f"{strategy}, expected some of both; give more --steps"
        )
    first = _row(f"{strategy}: steps without a save", len(found), quiet)
    yield first
    row = _row(f"{strategy}: steps beside a save", len(found), beside)
    counts = found[0]["counts"]
    row["saves"] = counts["saved"]
    row["save_s"] = sum(end - begin for begin, end in saves) / max(len(saves), 1)
    row["pause_ms"] = 1e3 * max(one["counts"]["pause_s_max"] for one in found)
    problems = []
    if counts["failed"] or not counts["saved"]:
        problems.append(f"saves: {counts}")
    if row["p999_ms"] > first["p999_ms"] + PAUSE_LIMIT_MS:
        problems.append(
            f"p99.9 of {row['p999_ms']:.0f} ms is more than {PAUSE_LIMIT_MS:.0f} ms "
            f"above the {first['p999_ms']:.0f} ms without a save"
        )
    row["problems"] = problems
    row["verified"] = not problems
    yield row


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields the rows of every strategy."""
    for strategy in args.strategies:
        if strategy not in STRATEGIES:
            raise SystemExit(
                f"pauses: strategy {strategy!r}, expected one of "
                f"{', '.join(STRATEGIES)}"
            )
        above = Path(args.folder or "build")
        above.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="pauses-", dir=above) as folder:
            variables = {
                _PREFIX + "STRATEGY": strategy,
                _PREFIX + "ROWS": str(args.table_rows),
                _PREFIX + "DIM": str(args.dim),
                _PREFIX + "BATCH": str(args.batch),
                _PREFIX + "STEPS": str(args.steps or STEPS),
                "CPUDIST_SNAPSHOT_DIR": str(Path(folder).resolve()),
                "CPUDIST_THREADS": "1",
            }
            count = args.trainers + args.servers
            ranks = ProcessRanks(
                _train, count, servers=args.servers, variables=variables
            )
            with ranks:
                found = ranks.results(args.launches * args.deadline_s)
        yield from figures(strategy, found[args.servers :])
