# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``sweep``: how long a server's table is held while rows of it are evicted.

A table without a vocabulary under SGD on one server in this process. One push makes
``--table-rows`` rows (1 million), and ``max_rows`` is that less what ``--launches``
rounds of updates evict: each update of a small push takes away as many rows as one may,
16,384, at its end, with the table's lock held. The same pushes once nothing more has to
go are beside them: ``held`` is what the sweep adds to their median, while which
everybody else waits. Then ``opt.shrink()`` of as many rows, all of them unseen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch
from report import Row

import torch_cpudist as cpudist
from torch_cpudist.testing import run_ranks

COLUMNS = {
    "name": "name",
    "rows": "rows",
    "evicted": "evicted",
    "ns_per_row": "ns/row",
    "median_ms": "median ms",
    "worst_ms": "worst ms",
    "held_ms": "held ms",
}
MOST_FREED = 16_384  # of an update, besides as many as it pushes
PUSHED = 64
ROWS = 1_000_000
ROUNDS = 8  # of a launch
UNDISTURBED = 64  # updates in which nothing is evicted
S_PER_ROW = 50e-6  # many times what it takes
VARIABLES = {"CPUDIST_THREADS": "1"}


class _Table:
    """A table of one trainer, by its keys."""

    def __init__(self, dim: int, lr: float, eviction: cpudist.Evict) -> None:
        self._table = cpudist.Embedding(dim, eviction=eviction)
        inner = torch.optim.SGD(self._table.parameters(), lr=lr)
        self.optimizer = cpudist.DistributedOptimizer(inner, self._table)
        self._next = 0

    def new_keys(self, count: int) -> torch.Tensor:
        """Keys that none before them were."""
        self._next += count
        numbers = torch.arange(self._next - count, self._next)
        return cpudist.hash_keys(numbers)

    def update(self, keys: torch.Tensor) -> float:
        """Seconds from a gradient to its update on the server."""
        self.optimizer.zero_grad()
        self._table(keys).sum().backward()
        began = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - began

    def counts(self) -> dict[str, int]:
        """What the server has of it."""
        (found,) = self.optimizer.table_stats().values()
        return found


def _row(name: str, rows: int, took_s: list[float], evicted: int) -> Row:
    return {
        "case": "sweep",
        "name": name,
        "rows": rows,
        "evicted": evicted,
        "median_ms": 1e3 * median(took_s),
        "worst_ms": 1e3 * max(took_s),
    }


def _rows(args: argparse.Namespace) -> int:
    rows: int = args.table_rows if "table_rows" in args.given else ROWS
    return rows


def _updates(args: argparse.Namespace) -> list[Row]:
    """Small pushes while as many rows go as may, and when none has to."""
    turns = args.launches * ROUNDS
    rows = _rows(args)
    most = rows - turns * MOST_FREED
    table = _Table(args.dim, args.lr, cpudist.Evict(max_rows=most))
    table.update(table.new_keys(rows))
    old = table.new_keys(PUSHED)
    table.update(old)  # its rows are new: as many more go
    evicted: list[int] = []
    sweeping: list[float] = []
    before = table.counts()["evicted"]
    for _ in range(turns - 1):
        took = table.update(old)
        after = table.counts()["evicted"]
        if after - before == MOST_FREED:
            sweeping.append(took)
            evicted.append(after - before)
        before = after
    while table.counts()["rows"] > most:
        table.update(old)
    resting = [table.update(old) for _ in range(UNDISTURBED)]
    first = _row("updates that evict", rows, sweeping, sum(evicted))
    second = _row("updates that do not", most, resting, 0)
    first["held_ms"] = first["median_ms"] - second["median_ms"]
    first["ns_per_row"] = 1e6 * first["held_ms"] / MOST_FREED
    return [first, second]


def _shrink(args: argparse.Namespace) -> Row:
    """All rows of a table at once, other requests between."""
    rows = _rows(args)
    table = _Table(args.dim, args.lr, cpudist.Evict(unseen_steps=1))
    table.update(table.new_keys(rows))
    # What it looks at itself is little beside the table.
    table.update(table.new_keys(PUSHED))
    began = time.perf_counter()
    (gone,) = table.optimizer.shrink().values()
    took = time.perf_counter() - began
    row = _row("opt.shrink()", rows, [took], gone)
    row["ns_per_row"] = 1e9 * took / gone
    return row


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields a row per measurement.

    Raises:
        ValueError: the table has fewer rows than its updates evict.
    """
    least = (args.launches * ROUNDS + 1) * MOST_FREED
    rows = _rows(args)
    if rows < least:
        raise ValueError(
            f"sweep: --table-rows {rows}: expected at least {least}, as --launches "
            f"{args.launches} evict as many"
        )
    for measure in (lambda: _updates(args), lambda: [_shrink(args)]):
        found: Any = run_ranks(
            lambda context, measure=measure: measure(),
            1,
            variables=VARIABLES,
            timeout_s=args.deadline_s + S_PER_ROW * rows,
        )
        yield from found[0]
