# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the case ``convergence`` trains: its parts, and how each run is started."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import word2vec
from cases.cnn import ROOT, Layout

FLIGHTS = ROOT / "examples" / "flights" / "flights.py"
PARTS = ("noise", "strategies", "intervals", "geo", "batch", "merge")
WORKLOADS = ("flights", "word2vec")
TRAINERS = (1, 2, 4)
NOISE_SEEDS = 5
# Groups of at most two: with one group for all HalfAsync is Sync.
GROUPS = {1: "0", 2: "0/1", 4: "0+1/2+3"}
PUSH_EVERY = (10, 50, 100, 400, 800)
# Beside the default, which the strategies have; 400 is longer than some trainings.
INTERVALS = (10, 50, 100, 400)
# What a step's samples are: of all trainers, and words of one trainer.
BATCH = {"flights": 1024, "word2vec": 2048}
# So that the longest interval between exchanges ends several times in an epoch.
GEO_BATCH = {"flights": 128, "word2vec": 256}
OTHER_BATCHES = (256, 4096)
OPTIMIZERS = {"flights": ("adagrad",), "word2vec": ("sgd", "adagrad")}
ONE = "sync"


@dataclass(frozen=True)
class Run:
    """One training; the same in two parts of the study is done once.

    Attributes:
        workload: ``flights`` or ``word2vec``.
        row: strategy and fields, as in the case ``word2vec``.
        trainers: processes, which also serve.
        batch: samples of a step of all trainers (flights), words of a trainer
            (word2vec).
        seed: of initial weights and of the order.
        optimizer: of torch.optim, by the name that word2vec's example has for it.
        merge: ``sum`` or ``mean`` of trainers' gradients where the strategy averages.
    """

    workload: str
    row: str
    trainers: int
    batch: int
    seed: int
    optimizer: str = "adagrad"
    merge: str = "sum"

    def layout(self) -> Layout:
        """Returns what is started, and with what variables."""
        script = FLIGHTS if self.workload == "flights" else word2vec.OURS
        return Layout(
            script,
            f"this package, {self.row}",
            trainers=self.trainers,
            torchrun=True,
            variables=word2vec.variables_of(self.row),
        )

    def command(self, args: argparse.Namespace, results: Path) -> list[str]:
        """Returns the command line; figures go to ``results``."""
        told: list[Any] = [sys.executable, "-m", "torch.distributed.run"]
        told += ["--standalone", f"--nproc-per-node={self.trainers}"]
        told += [self.layout().script, "--seed", self.seed, "--epochs", args.epochs]
        told += ["--batch-size", self.batch, "--results", results]
        told += ["--strategy", self.row.partition(":")[0]]
        if self.workload == "flights":
            told += ["--data", Path(args.data).resolve()]
            told += ["--rows", args.words] if args.words else []
        else:
            told += ["--data", Path(args.text).resolve(), "--merge", self.merge]
            told += ["--optimizer", self.optimizer]
            told += ["--words", args.words] if args.words else []
            if args.wordsim is not None:
                told += ["--wordsim", Path(args.wordsim).resolve()]
        return [str(word) for word in told]


def rows_of(workload: str, trainers: int) -> list[str]:
    """Returns every strategy that can train the workload, as rows."""
    rows = ["sync", f"half_async:group={GROUPS[trainers]}", "async", "geo"]
    rows += ["allreduce", "reduce"]
    if workload == "flights":  # word2vec has nothing but tables
        rows += ["hybrid", "hybrid:dense=local_sgd"]
    return rows


def one_process(run: Run) -> Run:
    """Returns the training of one process that ``run`` is compared with."""
    return Run(run.workload, ONE, 1, run.batch, run.seed, run.optimizer)


def plan(part: str, workload: str, seeds: int) -> Iterator[Run]:
    """Yields the runs of a part, the ones of one process first.

    Raises:
        ValueError: there is no such part or workload.
    """
    if part not in PARTS or workload not in WORKLOADS:
        raise ValueError(
            f"expected --parts of {', '.join(PARTS)} and --workloads of "
            f"{', '.join(WORKLOADS)}; found {part!r}, {workload!r}"
        )
    numbers = range(1, seeds + 1)
    batch = BATCH[workload]
    if part == "noise":
        for seed in range(1, NOISE_SEEDS + 1):
            yield Run(workload, ONE, 1, batch, seed)
    elif part == "strategies":
        for seed in numbers:
            for trainers in TRAINERS:
                for row in rows_of(workload, trainers):
                    yield Run(workload, row, trainers, batch, seed)
    elif part == "intervals":
        for seed in numbers:
            yield Run(workload, ONE, 1, batch, seed)
            for trainers in TRAINERS[1:]:
                for every in INTERVALS:
                    row = f"geo:push_every={every}"
                    yield Run(workload, row, trainers, batch, seed)
    elif part == "geo":
        for seed in numbers:
            yield Run(workload, ONE, 1, GEO_BATCH[workload], seed)
            for every in PUSH_EVERY:
                row = f"geo:push_every={every}"
                yield Run(workload, row, 2, GEO_BATCH[workload], seed)
    elif part == "batch":
        for size in OTHER_BATCHES:
            for trainers in TRAINERS:
                for row in ("sync", "async", "geo"):
                    yield Run(workload, row, trainers, size, 1)
    else:
        for seed in numbers:
            yield from _merges(workload, seed)


def _merges(workload: str, seed: int) -> Iterator[Run]:
    """Yields trainings that differ by how trainers' gradients or movements merge."""
    batch = BATCH[workload]
    for optimizer in OPTIMIZERS[workload]:
        yield Run(workload, ONE, 1, batch, seed, optimizer)
        for trainers in TRAINERS[1:]:
            for rule in ("sum", "mean"):
                row = f"geo:merge_rule={rule}"
                yield Run(workload, row, trainers, batch, seed, optimizer)
                if workload == "word2vec":  # whose example can scale its loss
                    yield Run(workload, ONE, trainers, batch, seed, optimizer, rule)
