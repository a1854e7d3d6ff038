# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``snapshot``: how long saves take, and what trainers notice of them.

One process, a trainer and the server that has its remote table of ``--table-rows`` rows
(row-wise Adagrad), which trains on Zipf ids. Each of ``--launches`` rounds has a save
while nobody trains, a plain write of as many bytes with an fsync, in the same directory
(``--folder``), and ``--steps`` steps, at one of which a save begins. Steps are sorted
by whether a save was under way. ``ratio`` is the plain write's time by that of a save:
medians of rounds, since the two take turns and a disk has moods.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cases.rows import zipf_batches
from report import Row
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.testing import run_ranks

COLUMNS = {
    "name": "name",
    "rows": "rows",
    "count": "count",
    "median_ms": "median ms",
    "p99_ms": "p99 ms",
    "p999_ms": "p99.9 ms",
    "worst_ms": "worst ms",
    "mb": "MB",
    "seconds": "s",
    "cpu_s": "CPU s",
    "mb_per_s": "MB/s",
    "ratio": "ratio",
    "images_mb": "images MB",
    "verified": "verified",
}
BATCHES = 64
STEPS = 3000
FILLED_AT_ONCE = 16_384
PIECE_BYTES = 4 << 20
# What p99.9 of steps may grow by.
PAUSE_LIMIT_MS = 100.0
RATIO_LIMIT = 0.7
MAKING_S_PER_ROW = 50e-6  # many times what it takes
KEEP = 1_000_000  # those that are measured are removed here, in nobody's time
VARIABLES = {"CPUDIST_THREADS": "1"}


@dataclass
class Seen:
    """What was measured, in seconds and bytes.

    Attributes:
        quiet, beside: steps without a save and with one under way.
        idle, training, raw: of each round, a save and the plain write; ``None`` for a
            save that failed.
        idle_cpu, raw_cpu: CPU time of all threads meanwhile.
        size_bytes: of a snapshot.
        images_bytes: the most that rows took which changed before they were written.
        problems: saves that failed.
    """

    quiet: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    idle_cpu: list[float] = field(default_factory=list)
    training: list[float | None] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    raw_cpu: list[float] = field(default_factory=list)
    size_bytes: int = 0
    images_bytes: int = 0
    problems: list[str] = field(default_factory=list)


class Trained:
    """A remote table that is trained, and its snapshots."""

    def __init__(self, args: argparse.Namespace, strategy: str, folder: str) -> None:
        """Of a run that has just begun; ``folder`` gets the snapshots."""
        self._shape = (args.table_rows, args.dim)
        with cpudist.remote_tables(min_rows=1):
            table = nn.Embedding(*self._shape)
        inner = cpudist.optim.RowWiseAdagrad(table.parameters(), lr=args.lr)
        self.optimizer = cpudist.DistributedOptimizer(inner, table, strategy=strategy)
        self.every_steps = args.steps or STEPS
        self.optimizer.resume(folder, every_steps=self.every_steps, keep=KEEP)
        self._table = table
        self._values = torch.full((FILLED_AT_ONCE, args.dim), 1e-3)
        self.steps = 0
        self._asked = 0

    def step(self, ids: torch.Tensor) -> float:
        """Seconds of a step on distinct ids."""
        began = time.perf_counter()
        self._table(ids)
        self._table.weight.grad = torch.sparse_coo_tensor(
            ids[None], self._values[: len(ids)], self._shape, check_invariants=False
        )
        self.optimizer.step()
        self.steps += 1
        return time.perf_counter() - began

    def fill(self) -> None:
        """Makes all rows."""
        for begin in range(0, self._shape[0], FILLED_AT_ONCE):
            self.step(torch.arange(begin, min(begin + FILLED_AT_ONCE, self._shape[0])))

    def counts(self) -> dict[str, Any]:
        """Saves so far."""
        counts: dict[str, Any] = self.optimizer.stats()["snapshot"]
        return counts

    def save(self) -> str:
        """Saves now, while nobody trains."""
        self._asked += 1
        name: str = self.optimizer.save_snapshot()
        return name

    def saving(self) -> bool:
        """Whether a save has begun and is not over."""
        counts = self.counts()
        over = counts["saved"] + counts["failed"] + counts["skipped"]
        return bool(over < self.steps // self.every_steps + self._asked)

    def settle(self) -> None:
        """Waits for the end of what is being saved."""
        while self.saving():
            time.sleep(0.001)


def write_plainly(folder: Path, size_bytes: int) -> None:
    """So many bytes into one file, and onto the disk."""
    piece = os.urandom(PIECE_BYTES)
    file = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for begin in range(0, size_bytes, PIECE_BYTES):
            left = memoryview(piece)[: size_bytes - begin]
            while left:
                left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)


def _clear(folder: Path) -> None:
    """Takes away what was written; the disk has nothing left to do then."""
    for found in folder.iterdir():
        shutil.rmtree(found) if found.is_dir() else found.unlink()
    os.sync()


def _size_bytes(folder: Path) -> int:
    return sum(found.stat().st_size for found in folder.rglob("*") if found.is_file())


def _save_idle(trained: Trained, folder: Path, seen: Seen) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    trained.save()
    seen.idle.append(time.perf_counter() - began)
    seen.idle_cpu.append(time.process_time() - cpu)
    _clear(folder)


def _write_raw(folder: Path, seen: Seen) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    write_plainly(folder, seen.size_bytes)
    seen.raw.append(time.perf_counter() - began)
    seen.raw_cpu.append(time.process_time() - cpu)
    _clear(folder)


def _train(
    trained: Trained, batches: list[torch.Tensor], server: Any, seen: Seen
) -> None:
    """As many steps as there are between two saves, half of them before one."""
    before = trained.counts()
    saving = False
    for turn in range(trained.every_steps):
        took_s = trained.step(batches[turn % len(batches)])
        before_it, saving = saving, trained.saving()
        begun = trained.steps % trained.every_steps == 0
        (seen.beside if before_it or saving or begun else seen.quiet).append(took_s)
        if saving:
            seen.images_bytes = max(seen.images_bytes, server.stats()["snapshot_bytes"])
    if saving:
        seen.problems.append("a save took longer than the steps: set --steps higher")
    trained.settle()
    counts = trained.counts()
    if counts["saved"] == before["saved"] + 1:
        seen.training.append(counts["last_s"])
    else:
        seen.training.append(None)
        seen.problems.append(f"a save beside training was not made: {counts}")


def measure(
    args: argparse.Namespace, strategy: str, context: cpudist.Context, folder: Path
) -> Seen:
    """All rounds of one run."""
    seen = Seen()
    trained = Trained(args, strategy, str(folder))
    trained.fill()
    batches = [ids.unique() for ids in zipf_batches(args.table_rows, BATCHES, seed=1)]
    while trained.steps % trained.every_steps != trained.every_steps // 2:
        trained.step(batches[trained.steps % len(batches)])
    trained.settle()
    name = trained.save()  # the first of all makes its memory
    seen.size_bytes = _size_bytes(folder / name)
    _clear(folder)
    for turn in range(args.launches):
        if turn % 2:
            _write_raw(folder, seen)
        _save_idle(trained, folder, seen)
        if turn % 2 == 0:
            _write_raw(folder, seen)
        _train(trained, batches, context.server, seen)
        _clear(folder)
    return seen


def _steps(name: str, rows: int, took_s: list[float]) -> Row:
    ordered = sorted(took_s)

    def at(share: float) -> float:
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "case": "snapshot",
        "name": name,
        "rows": rows,
        "count": len(ordered),
        "median_ms": at(0.5),
        "p99_ms": at(0.99),
        "p999_ms": at(0.999),
        "worst_ms": 1e3 * ordered[-1],
    }


def _writes(
    name: str, seen: Seen, took_s: Sequence[float | None], cpu_s: list[float]
) -> Row:
    """Of each round one; those that failed have no figures, and nobody else's."""
    pairs = [(raw, took) for raw, took in zip(seen.raw, took_s, strict=True) if took]
    row: Row = {"case": "snapshot", "name": name, "count": len(pairs)}
    if pairs:
        took = median(took for _, took in pairs)
        row |= {
            "mb": seen.size_bytes / 1e6,
            "seconds": took,
            "cpu_s": median(cpu_s) if cpu_s else None,
            "mb_per_s": seen.size_bytes / 1e6 / took,
            "ratio": median(raw / took for raw, took in pairs),
        }
    return row


def _judged(row: Row, rounds: int) -> Row:
    """A save that is compared with the plain write of its round."""
    problems = []
    if row["count"] < rounds:
        problems.append(f"{row['count']} of {rounds} saves were made")
    if "ratio" in row and row["ratio"] < RATIO_LIMIT:
        problems.append(f"ratio {row['ratio']:.2f}, expected {RATIO_LIMIT}")
    row["problems"] = problems
    row["verified"] = not problems
    return row


def figures(args: argparse.Namespace, strategy: str, seen: Seen) -> Iterable[Row]:
    """The rows of one run, each verified against its bound."""
    rows = args.table_rows
    quiet = _steps(f"{strategy}: steps without a save", rows, seen.quiet)
    yield quiet
    beside = _steps(f"{strategy}: steps beside a save", rows, seen.beside)
    beside["images_mb"] = seen.images_bytes / 1e6
    beside["problems"] = list(seen.problems)
    if beside["p999_ms"] > quiet["p999_ms"] + PAUSE_LIMIT_MS:
        beside["problems"].append(
            f"p99.9 of {beside['p999_ms']:.0f} ms is more than {PAUSE_LIMIT_MS:.0f} ms "
            f"above the {quiet['p999_ms']:.0f} ms without a save"
        )
    beside["verified"] = not beside["problems"]
    yield beside
    yield _writes("plain write and fsync", seen, seen.raw, seen.raw_cpu)
    idle = _writes(f"{strategy}: save, nobody trains", seen, seen.idle, seen.idle_cpu)
    yield _judged(idle, len(seen.raw))
    training = _writes(f"{strategy}: save, training goes on", seen, seen.training, [])
    yield _judged(training, len(seen.raw))


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields the rows of every strategy."""
    for strategy in args.strategies:
        above = Path(args.folder or "build")
        above.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="snapshot-", dir=above) as folder:
            place = Path(folder).resolve()
            found: Any = run_ranks(
                lambda context, s=strategy, p=place: measure(args, s, context, p),
                1,
                variables=VARIABLES,
                timeout_s=args.launches * args.deadline_s
                + MAKING_S_PER_ROW * args.table_rows,
            )
        yield from figures(args, strategy, found[0])
