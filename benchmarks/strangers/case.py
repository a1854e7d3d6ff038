# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``strangers``: the pace of a job with a key, with and without uninvited guests.

``--trainers`` ranks that also serve train a table and a dense parameter under each of
``--strategies``. In turns nobody comes for ``--seconds``, and then strangers of one
kind (``--rows``, default: all) do, fifty a second or, where they stay, up to
``--sockets`` at a time, 500 a second; ``--launches`` rounds of all kinds. A row is the
median of the rounds; ``ratio`` of each round's two windows, one after the other, which
differ by themselves as much as the row ``nobody`` says. All strangers must be refused
and counted, every gradient applied once, and the pace is to be 0.95 of what it was.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Row
from torch import nn

import torch_cpudist as cpudist
from strangers.frames import Target, spoken_version
from strangers.kinds import KINDS, NOBODY, STAY, Visitors
from torch_cpudist.testing import ProcessRanks

COLUMNS = {
    "name": "name",
    "alone": "steps/s alone",
    "beside": "steps/s beside",
    "ratio": "ratio",
    "ratio_min": "min",
    "ratio_max": "max",
    "made": "came",
    "refused": "refused",
    "counted": "counted",
    "most_open": "most open",
    "cpu_share": "their cores",
    "verified": "verified",
}
# Until those who were refused are in the counters, on a busy machine.
COUNTED_S = 20.0
LEAST_RATIO = 0.95
ROWS, DIM, IDS = 4_000, 8, 300
EVERY = 10  # steps, until they are told
_KEY = "a key for strangers to look for!"
_FOLDER = "STRANGERS_BENCHMARK_FOLDER"
_STRATEGY = "STRANGERS_BENCHMARK_STRATEGY"


class Counted(nn.Module):
    """A step adds one to a row for each id that names it."""

    def __init__(self) -> None:
        super().__init__()
        with cpudist.remote_tables(min_rows=1):
            self.table = nn.Embedding(ROWS, DIM, sparse=True)
            nn.init.zeros_(self.table.weight)
        self.dense = nn.Parameter(torch.zeros(1_000))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return -(self.table(ids).sum() + self.dense.sum())


def _tell(path: Path, text: str) -> None:
    """All of it or nothing, for whoever reads meanwhile."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def _train(context: cpudist.Context, report: Any) -> dict[str, float]:
    """Steps until it is told to stop; says how many, and how many were refused."""
    torch.set_num_threads(1)
    folder, strategy = Path(os.environ[_FOLDER]), os.environ[_STRATEGY]
    model = Counted()
    # Under Sync a gradient counts as one of so many.
    lr = float(context.trainer_count) if strategy == "sync" else 1.0
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
    where = [one for one in context.addresses() if one.startswith("tcp:")]
    report({"where": where, "run_id": context.run_id, "shard": context.shard_id})
    own = folder / f"rank-{context.trainer_rank}"
    made = 0
    while not (folder / "stop").exists():
        for _ in range(EVERY):
            opt.zero_grad()
            model(torch.randint(ROWS, (IDS,))).backward()
            opt.step()
        made += EVERY
        server = context.server
        stats = {} if server is None else server.stats()
        refused = stats.get("unauthenticated", 0) + stats.get("turned_away", 0)
        _tell(own, f"{made} {int(refused)}")
    cpudist.barrier()
    opt.flush()
    with torch.no_grad():
        rows = model.table(torch.arange(ROWS))[:, 0].double().sum().item()
    cpudist.barrier()
    return {"made": made, "rows": rows, "dense": model.dense.detach()[0].item()}


class Job:
    """The job as its files tell of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def counts(self) -> tuple[int, int]:
        """Steps of all, and who was refused."""
        texts = [path.read_text().split() for path in self._folder.glob("rank-?")]
        return sum(int(one[0]) for one in texts), sum(int(one[1]) for one in texts)

    def pace(self, seconds: float) -> float:
        """Steps of all trainers together in a second."""
        began_s, before = time.monotonic(), self.counts()[0]
        time.sleep(seconds)
        return (self.counts()[0] - before) / (time.monotonic() - began_s)


def _round(job: Job, kind: str, who: Visitors, seconds: float) -> Row:
    """A window without strangers, and one beside them."""
    alone = job.pace(seconds)
    counted = job.counts()[1]
    done = threading.Event()
    thread = threading.Thread(target=who.run, args=(kind, done))
    thread.start()
    try:
        beside = job.pace(seconds)
    finally:
        done.set()
        thread.join()
    # Counters come with the next steps.
    until_s = time.monotonic() + COUNTED_S
    while kind not in STAY and job.counts()[1] - counted < who.visits.made:
        if time.monotonic() >= until_s:
            break
        time.sleep(0.05)
    return {
        "alone": alone,
        "beside": beside,
        "ratio": beside / alone,
        "made": who.visits.made,
        "refused": who.visits.refused,
        "counted": job.counts()[1] - counted,
        "most_open": who.visits.most_open,
        "cpu_share": who.visits.cpu_s / seconds,
    }


def figures(name: str, kind: str, rounds: list[Row], wrong: list[str]) -> Row:
    """The row of one kind; ``wrong`` speaks against the whole job."""
    ratios = [one["ratio"] for one in rounds]
    row: Row = {"case": "strangers", "name": f"{name}: {kind}"}
    row |= {key: median(one[key] for one in rounds) for key in ("alone", "beside")}
    row |= {"ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    row |= {key: sum(one[key] for one in rounds) for key in ("made", "refused")}
    row["counted"] = sum(one["counted"] for one in rounds)
    row["most_open"] = max(one["most_open"] for one in rounds)
    row["cpu_share"] = median(one["cpu_share"] for one in rounds)
    problems = list(wrong)
    if kind == NOBODY:
        return row | {"problems": problems, "verified": not problems}
    if row["ratio"] < LEAST_RATIO:
        problems.append(f"a pace of {row['ratio']:.3f}, expected {LEAST_RATIO}")
    if not row["made"]:
        problems.append("no stranger came")
    for key in ("refused", "counted"):
        # Those that stay are there to take places: whoever needs one sends them away.
        if kind not in STAY and row[key] < row["made"]:
            problems.append(f"of {row['made']} strangers {row[key]} were {key}")
    return row | {"problems": problems, "verified": not problems}


def check_sums(found: list[dict[str, float]], strategy: str) -> list[str]:
    """What speaks against every gradient having been applied once.

    A trainer may see that it is to stop some steps before another does. Sync takes the
    mean over who is still in a round, so that each round counts as one of all trainers.
    """
    each = [one["made"] for one in found]
    made = len(each) * max(each) if strategy == "sync" else sum(each)
    problems = []
    for rank, one in enumerate(found):
        for what, expected in (("rows", made * IDS), ("dense", made)):
            if abs(one[what] - expected) > 1e-5 * expected:
                problems.append(
                    f"trainer {rank} finds {one[what]:.0f} in {what}, expected "
                    f"{expected:.0f}"
                )
    return problems


def _measure(args: argparse.Namespace, strategy: str, folder: Path) -> Iterator[Row]:
    kinds = args.rows or list(KINDS)
    variables = {
        _FOLDER: str(folder),
        _STRATEGY: strategy,
        "CPUDIST_THREADS": "1",
        "CPUDIST_SECRET": _KEY,
    }
    found: dict[str, list[Row]] = {kind: [] for kind in kinds}
    version = spoken_version()
    with ProcessRanks(_train, args.trainers, variables=variables) as ranks:
        targets = []
        for rank in range(args.trainers):
            told = ranks.expect(rank, "report", args.deadline_s)["value"]
            rest = {"run_id": told["run_id"], "shard": told["shard"], "rank": rank}
            targets += [Target(one, version=version, **rest) for one in told["where"]]
        job = Job(folder)
        until_s = time.monotonic() + args.deadline_s
        while job.counts()[0] < args.warmup_steps and time.monotonic() < until_s:
            time.sleep(0.05)
        for _ in range(args.launches):
            for kind in kinds:
                who = Visitors(targets, _KEY.encode(), args.sockets)
                found[kind].append(_round(job, kind, who, args.seconds))
        (folder / "stop").touch()
        wrong = check_sums(ranks.results(args.deadline_s), strategy)
    for kind in kinds:
        yield figures(strategy, kind, found[kind], wrong)


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields the rows of every strategy."""
    unknown = [kind for kind in args.rows if kind not in KINDS]
    if unknown:
        raise SystemExit(f"strangers: {unknown}, expected some of {', '.join(KINDS)}")
    above = Path(args.folder or "build")
    above.mkdir(parents=True, exist_ok=True)
    for strategy in args.strategies:
        with tempfile.TemporaryDirectory(prefix="strangers-", dir=above) as folder:
            yield from _measure(args, strategy, Path(folder).resolve())
