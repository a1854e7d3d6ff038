# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``rows``: a server's table of many rows, and what makes trainers wait for it.

A remote table under row-wise Adagrad on one server in this process: rows come into
being with pushes of 1,024 new ones, then batches of Zipf ids are gathered, then eight
trainers pull such batches while one of them pushes. ``pause`` is the longest push, what
others would wait for; ``bytes a row`` what the server counts for rows and index.
Beside it, what wrapping a static table of ``--wrapped-rows`` takes, the first of ranks
to the last, with one and with two that serve it; ``CPU s`` is of all their threads.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from ctr_data import zipf_cdf
from report import Row
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.testing import run_ranks

COLUMNS = {
    "name": "name",
    "rows": "rows",
    "ns_per_row": "ns/row",
    "median_ms": "median ms",
    "p999_ms": "p99.9 ms",
    "worst_ms": "worst ms",
    "bytes_per_row": "bytes/row",
    "seconds": "s",
    "cpu_s": "CPU s",
}
NEW_ROWS = 1024
IDS = 26 * 512
BATCHES = 64
PULLS = 200
PULLING = 8
GROWING_S_PER_ROW = 50e-6  # many times what it takes
VARIABLES = {"CPUDIST_THREADS": "1"}


def _at(sorted_s: list[float], share: float) -> float:
    """The value in milliseconds that this share of all is at most."""
    return 1e3 * sorted_s[min(len(sorted_s) - 1, int(share * len(sorted_s)))]


def _figures(name: str, took_s: list[float], rows_each: float, rows: int) -> Row:
    took_s = sorted(took_s)
    return {
        "case": "rows",
        "name": name,
        "rows": rows,
        "ns_per_row": 1e9 * sum(took_s) / (len(took_s) * rows_each),
        "median_ms": _at(took_s, 0.5),
        "p999_ms": _at(took_s, 0.999),
        "worst_ms": 1e3 * took_s[-1],
    }


def zipf_batches(rows: int, count: int, seed: int) -> list[torch.Tensor]:
    """Ids of batches, frequent ones scattered over the table, as hashed ids are."""
    generator = torch.Generator().manual_seed(seed)
    cdf = torch.from_numpy(zipf_cdf(rows, 1.05))
    found = []
    for _ in range(count):
        drawn = torch.rand(IDS, generator=generator, dtype=torch.float64)
        ranks = torch.searchsorted(cdf, drawn).clamp_(max=rows - 1)
        found.append(ranks * 2_654_435_761 % rows)
    return found


class _Table:
    """A remote table of one trainer, by its keys."""

    def __init__(self, rows: int, dim: int, lr: float) -> None:
        with cpudist.remote_tables(min_rows=1):
            table = nn.Embedding(rows, dim)
        inner = cpudist.optim.RowWiseAdagrad(table.parameters(), lr=lr)
        self.optimizer = cpudist.DistributedOptimizer(inner, table, strategy="async")
        self._shape = (rows, dim)
        self._weight = table.weight
        self._lookup = table

    def look_up(self, ids: torch.Tensor) -> float:
        """Seconds that the rows of a forward without gradients took."""
        with torch.no_grad():
            began = time.perf_counter()
            self._lookup(ids)
            return time.perf_counter() - began

    def push(self, ids: torch.Tensor) -> float:
        """Seconds from a gradient of distinct ids to its update on the server."""
        self._lookup(ids)
        values = torch.ones(len(ids), self._shape[1])
        self._weight.grad = torch.sparse_coo_tensor(
            ids[None], values, self._shape, check_invariants=False
        )
        began = time.perf_counter()
        self.optimizer.step()
        self.optimizer.flush("none")
        return time.perf_counter() - began


def _grow(args: argparse.Namespace, context: cpudist.Context) -> list[Row]:
    table = _Table(args.table_rows, args.dim, args.lr)
    took = [
        table.push(torch.arange(begin, min(begin + NEW_ROWS, args.table_rows)))
        for begin in range(0, args.table_rows, NEW_ROWS)
    ]
    grown = _figures("pushes of 1,024 new rows", took, NEW_ROWS, args.table_rows)
    assert context.server is not None
    (told,) = context.server.table_stats()
    grown["bytes_per_row"] = told["bytes"] / told["rows"]
    batches = zipf_batches(args.table_rows, BATCHES, seed=1)
    distinct = sum(len(ids.unique()) for ids in batches) / BATCHES
    gathered = [table.look_up(ids) for _ in range(3) for ids in batches]
    return [
        grown,
        _figures("lookups of Zipf ids", gathered, distinct, args.table_rows),
    ]


def _pull_together(args: argparse.Namespace) -> Row:
    """Pulls of eight trainers, one of which pushes all the time."""
    rows = min(args.table_rows, 1_000_000)
    met = threading.Barrier(PULLING)
    done = threading.Event()
    pulled: dict[int, bool] = {}

    def body(context: cpudist.Context) -> list[float]:
        rank = context.trainer_rank
        table = _Table(rows, args.dim, args.lr)
        batches = zipf_batches(rows, 8, seed=rank)
        met.wait(600.0)
        took: list[float] = []
        if rank == 0:
            while not done.is_set():
                for ids in batches:
                    table.push(ids.unique())
        else:
            took = [table.look_up(batches[turn % 8]) for turn in range(PULLS)]
            pulled[rank] = True
            if len(pulled) == PULLING - 1:
                done.set()
        return took

    found: Any = run_ranks(body, PULLING, servers=1, variables=VARIABLES)
    pulls = [one for took in found for one in took]
    return _figures(f"pulls of {PULLING - 1} beside pushes of one", pulls, IDS, rows)


_RULES = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}


def _wrap(args: argparse.Namespace, rule: str, trainers: int) -> Row:
    """Trainers are threads of this process: each has the table, and serves a share."""
    met = threading.Barrier(trainers)

    def body(context: cpudist.Context) -> tuple[float, float]:
        table = nn.Embedding(args.wrapped_rows, args.dim, sparse=True)
        inner = _RULES[rule](table.parameters(), lr=args.lr)
        met.wait(600.0)
        began, began_cpu = time.perf_counter(), time.process_time()
        wrapped = cpudist.DistributedOptimizer(inner, table)
        took = time.perf_counter() - began, time.process_time() - began_cpu
        met.wait(600.0)
        wrapped.close()
        return took

    found: Any = run_ranks(body, trainers, variables=VARIABLES, timeout_s=900.0)
    seconds, cpu_s = (max(of) for of in zip(*found, strict=True))
    return {
        "case": "rows",
        "name": f"wrapping a static table ({rule}), trainers: {trainers}",
        "rows": args.wrapped_rows,
        "ns_per_row": 1e9 * seconds / args.wrapped_rows,
        "seconds": seconds,
        "cpu_s": cpu_s,
    }


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Yields a row per measurement."""
    found: Any = run_ranks(
        lambda context: _grow(args, context),
        1,
        variables=VARIABLES,
        timeout_s=args.deadline_s + GROWING_S_PER_ROW * args.table_rows,
    )
    yield from found[0]
    yield _pull_together(args)
    for rule in _RULES:
        for trainers in (1, 2):
            yield _wrap(args, rule, trainers)
