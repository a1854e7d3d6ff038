# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``remote``: lookups of a remote table beside torch's own on the same rows.

One process on one core, one thread: a trainer and the server that has the rows. Ways to
look up take turns, each with another one of 64 batches of 26 x 512 Zipf ids, so that
none finds what the one before has brought into the caches; figures are medians over
``--launches`` times all batches. ``CPU us`` is of all threads of the process. All
give the same bits, which is checked.

``nn.EmbeddingBag``, the reference, has one id a bag. Its weight is as torch makes it;
``on huge pages`` it is where the tables of this package put theirs. ``dictionary`` is
what a table without bounds takes in plain torch: a Python dictionary from keys to rows,
then an index.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from report import Row
from torch import nn

import torch_cpudist as cpudist
from cases.rows import IDS, zipf_batches
from torch_cpudist.testing import run_ranks

COLUMNS = {
    "name": "name",
    "rows": "rows",
    "us": "us",
    "us_min": "min",
    "us_max": "max",
    "cpu_us": "CPU us",
    "ratio": "reference / us",
    "ratio_cpu": "by CPU",
    "verified": "verified",
}
BATCHES = 64
REFERENCE = "nn.EmbeddingBag"
MADVISE_HUGE = 14  # of Linux
# Filling, storing and the dictionary; many times what they take.
MAKING_S_PER_ROW = 20e-6
VARIABLES = {"CPUDIST_THREADS": "1"}

Lookup = Callable[[torch.Tensor], torch.Tensor]


def _on_huge_pages(values: torch.Tensor) -> torch.Tensor:
    memory = mmap.mmap(-1, values.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(MADVISE_HUGE)
    return torch.frombuffer(memory, dtype=values.dtype).view_as(values).copy_(values)


def _bags(values: torch.Tensor) -> Lookup:
    bags = nn.EmbeddingBag(*values.shape, mode="sum", sparse=True, _weight=values)
    offsets = torch.arange(IDS)
    return lambda ids: bags(ids, offsets)  # type: ignore[no-any-return]


def _plain(values: torch.Tensor) -> dict[str, Lookup]:
    table = nn.Embedding.from_pretrained(values, freeze=False, sparse=True)
    places = {key: key for key in range(len(values))}

    def by_dictionary(ids: torch.Tensor) -> torch.Tensor:
        return values[torch.tensor([places[key] for key in ids.tolist()])]

    return {
        REFERENCE: _bags(values),
        f"{REFERENCE} on huge pages": _bags(_on_huge_pages(values)),
        "nn.Embedding": table,
        "dictionary, then index": by_dictionary,
    }


class _Remote:
    """The same rows in a remote table."""

    def __init__(self, values: torch.Tensor, lr: float) -> None:
        shape = tuple(values.shape)
        rows = nn.Embedding(*shape, sparse=True, _weight=values.clone())
        bags = nn.EmbeddingBag(*shape, mode="sum", sparse=True, _weight=rows.weight)
        bags.weight = rows.weight
        model = nn.ModuleDict({"rows": rows, "bags": bags})
        self._table, self._bags = rows, bags
        cpudist.shard_tables(model, remote=True)
        inner = cpudist.optim.RowWiseAdagrad(model.parameters(), lr=lr)
        self.optimizer = cpudist.DistributedOptimizer(inner, model, strategy="async")
        self._offsets = torch.arange(IDS)

    @torch.no_grad()
    def _passing(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._table(ids)
        return found

    def lookups(self) -> dict[str, Lookup]:
        """Those of evaluation, of training, and of bags in training."""
        return {
            "remote nn.Embedding, no_grad": self._passing,
            "remote nn.Embedding": self._table,
            "remote nn.EmbeddingBag": lambda ids: self._bags(ids, self._offsets),
        }


def differing(lookups: dict[str, Lookup], batches: list[torch.Tensor]) -> set[str]:
    """Which do not give the bits of the reference."""
    other: set[str] = set()
    for ids in batches:
        expected = lookups[REFERENCE](ids)
        other |= {n for n, found in lookups.items() if not found(ids).equal(expected)}
    return other


def _measure(
    lookups: dict[str, Lookup], batches: list[torch.Tensor], forget: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and CPU seconds of every lookup of every batch."""
    took: dict[str, list[float]] = {name: [] for name in lookups}
    cpu: dict[str, list[float]] = {name: [] for name in lookups}
    names = list(lookups)
    orders = random.Random(1)
    apart = max(1, len(batches) // len(names))
    for turn in range(len(batches)):
        # In another order each time: what one leaves in the caches is not always for
        # the same other.
        orders.shuffle(names)
        for place, name in enumerate(names):
            look_up = lookups[name]
            ids = batches[(turn + place * apart) % len(batches)]
            forget()
            began_cpu = time.process_time()
            began = time.perf_counter()
            found = look_up(ids)
            took[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - began_cpu)
            del found
    return took, cpu


def _run(args: argparse.Namespace) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    values = torch.empty(args.table_rows, args.dim).normal_(generator=generator)
    remote = _Remote(values, args.lr)
    lookups = {**_plain(values), **remote.lookups()}
    batches = zipf_batches(args.table_rows, BATCHES, seed=1)

    def forget() -> None:
        # A step without gradients ends the rows of the one before.
        remote.optimizer.step()
        remote.optimizer.flush("none")

    other = differing(lookups, batches)
    took: dict[str, list[float]] = {name: [] for name in lookups}
    cpu: dict[str, list[float]] = {name: [] for name in lookups}
    for _ in range(args.launches):
        more, more_cpu = _measure(lookups, batches, forget)
        for name in lookups:
            took[name] += more[name]
            cpu[name] += more_cpu[name]
    base, base_cpu = median(took[REFERENCE]), median(cpu[REFERENCE])
    return [
        {
            "case": "remote",
            "name": name,
            "rows": args.table_rows,
            "us": 1e6 * median(took[name]),
            "us_min": 1e6 * min(took[name]),
            "us_max": 1e6 * max(took[name]),
            "cpu_us": 1e6 * median(cpu[name]),
            "ratio": base / median(took[name]),
            "ratio_cpu": base_cpu / median(cpu[name]),
            "verified": name not in other,
            "problems": ["other bits"] if name in other else [],
        }
        for name in lookups
    ]


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Returns a row per way to look up."""
    allowed = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, {min(allowed)})
    torch.set_num_threads(1)
    try:
        found: Any = run_ranks(
            lambda context: _run(args),
            1,
            variables=VARIABLES,
            timeout_s=args.deadline_s + MAKING_S_PER_ROW * args.table_rows,
        )
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
    return found[0]  # type: ignore[no-any-return]
