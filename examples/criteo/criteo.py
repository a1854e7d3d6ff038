# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a click-through model on files in Criteo's format.

Without ``--files`` it writes files of that format whose labels a hidden model draws, so
there is an AUC to reach. Runs by itself, under torchrun with any number of trainers,
and with dedicated servers (CPUDIST_SERVERS); every trainer reads its share.

With --open the table has no vocabulary: every value of every column is a key of its
own, on the servers only. --count-filter gives a row to those alone that come again,
--max-rows lets those go that have not come for longest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import criteo_data
import torch
import torch.nn.functional as F
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import strategies
from torch_cpudist.data import QueueDataset, criteo_slots

CATEGORIES = [f"C{number}" for number in range(1, criteo_data.CATEGORIES + 1)]
# Which keep tables on servers.
OPEN_STRATEGIES = ("sync", "half_async", "async", "hybrid")
DIM = 16
INITIAL_STD = 0.01
Batch = dict[str, Any]


class HashedIds(nn.Module):
    """The rows of ids below `hash_range`, a part of one table for each column."""

    def __init__(self, hash_range: int) -> None:
        """Make a table of `hash_range` rows for each column."""
        super().__init__()
        columns = len(CATEGORIES)
        self.table = nn.Embedding(columns * hash_range, DIM, sparse=True)
        self.register_buffer("first", torch.arange(columns) * hash_range)
        nn.init.normal_(self.table.weight, std=INITIAL_STD)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return rows ``[n, columns, DIM]``."""
        ids = torch.stack([batch[name].ids for name in CATEGORIES], dim=1)
        rows: torch.Tensor = self.table(ids + self.first)
        return rows


class AnyKeys(nn.Module):
    """The rows of all values that there are: no vocabulary, and none share a row."""

    def __init__(self, count_filter: int, max_rows: int | None) -> None:
        """Make a table that begins empty, and say which keys get a row in it."""
        super().__init__()
        admission = cpudist.CountFilter(count_filter) if count_filter > 1 else None
        eviction = None if max_rows is None else cpudist.Evict(max_rows=max_rows)
        self.table = cpudist.Embedding(
            DIM,
            initial=cpudist.Normal(0.0, INITIAL_STD),
            admission=admission,
            eviction=eviction,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return rows ``[n, columns, DIM]``."""
        # The field keeps equal values of different columns apart.
        keys = [
            cpudist.hash_keys(batch[name].ids, field=number)
            for number, name in enumerate(CATEGORIES)
        ]
        rows: torch.Tensor = self.table(torch.stack(keys, dim=1))
        return rows


class CtrDnn(nn.Module):
    """Embeddings of all categorical values and the numbers, through a network."""

    def __init__(self, embeddings: nn.Module) -> None:
        """Make the network over `embeddings`, which have rows for a batch."""
        super().__init__()
        self.embeddings = embeddings
        width = len(CATEGORIES) * DIM + criteo_data.NUMBERS
        self.network = nn.Sequential(
            nn.Linear(width, 400),
            nn.ReLU(),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 1),
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return logits ``[n]``."""
        rows = self.embeddings(batch).flatten(1)
        numbers = torch.log1p(batch["dense"].clamp(min=0))
        logits: torch.Tensor = self.network(torch.cat([rows, numbers], dim=1))
        return logits.squeeze(1)


def build(options: argparse.Namespace) -> CtrDnn:
    """Make the model; with --open it has no rows on this trainer."""
    if options.open:
        return CtrDnn(AnyKeys(options.count_filter, options.max_rows))
    return CtrDnn(HashedIds(options.hash_range))


def dataset(files: list[Path], options: argparse.Namespace, epoch_shuffle: bool):
    """Return a reader of this trainer's share of some files."""
    return QueueDataset(
        files,
        criteo_slots(hash_range=None if options.open else options.hash_range),
        format="criteo",
        batch_size=options.batch_size,
        shuffle=epoch_shuffle,
        threads=options.threads,
        bad_lines="skip",
    )


def made_files(options: argparse.Namespace) -> float:
    """Make the files and put them into the options; return the hidden model's AUC."""
    keys = criteo_data.keys_of(options)
    if cpudist.trainer_rank() == 0:
        criteo_data.prepare(options.data, options.rows, options.parts, keys=keys)
    cpudist.barrier()
    made = criteo_data.prepare(options.data, options.rows, options.parts, keys=keys)
    options.files, options.test = made["train"], made["test"]
    ceiling: float = made["ceiling"]
    return ceiling


def train(options: argparse.Namespace) -> None:
    """Train on the files and measure on the test file; every trainer calls this."""
    ceiling = made_files(options) if options.files is None else None
    torch.manual_seed(options.seed)
    model = build(options)
    optimizer = cpudist.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=options.lr),
        model,
        strategy=options.strategy,
    )

    def step(batch: Batch) -> dict[str, torch.Tensor]:
        optimizer.zero_grad()
        logits, labels = model(batch), batch["label"].squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step(samples=len(labels))
        return {"loss": loss.detach()}

    reader = dataset(options.files, options, epoch_shuffle=True)
    run = cpudist.train_from_dataset(
        step,
        reader,
        epochs=options.epochs,
        fetch=["loss"],
        print_every=options.print_every,
    )
    cpudist.barrier()
    optimizer.flush("dense")

    def score(batch: Batch) -> dict[str, torch.Tensor]:
        return {"predictions": model(batch), "labels": batch["label"].squeeze(1)}

    model.eval()
    metrics = cpudist.metrics
    test = cpudist.infer_from_dataset(
        score,
        dataset([options.test], options, False),
        metrics={
            "auc": metrics.AUC(from_logits=True),
            "log_loss": metrics.LogLoss(from_logits=True),
            "calibration": metrics.Calibration(from_logits=True),
        },
        all_trainers=True,
        print_every=None,
    )
    if cpudist.trainer_rank() == 0:
        tables = optimizer.table_stats() if options.open else {}
        report(run, dict(test.metrics), ceiling, tables, options)


def report(
    run: Any,
    found: dict[str, Any],
    ceiling: float | None,
    tables: dict[str, dict[str, int]],
    options: argparse.Namespace,
) -> None:
    """Say what was learned, how fast, and what the servers keep of it."""
    print(
        f"{run.samples_per_s:,.0f} samples/s per trainer, "
        f"{run.waiting_share:.1%} of the time waiting for data"
    )
    of = "" if ceiling is None else f" of at most {ceiling:.4f}"
    print(f"test: AUC {found['auc']:.4f}{of}, log loss {found['log_loss']:.4f}")
    for name, table in tables.items():
        print(
            f"{name}: {table['rows']:,} rows, {table['bytes'] / 1e6:,.1f} MB on the "
            f"servers; of keys without a row {table['filtered']:,} gradients were "
            f"dropped; {table['evicted']:,} rows were let go"
        )
    if options.results is not None:
        figures = {
            "auc": found["auc"],
            "log_loss": found["log_loss"],
            "ceiling": ceiling,
            "samples": run.samples,
            "samples_per_s": run.samples_per_s,
            "tables": tables,
        }
        options.results.write_text(json.dumps(figures) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--files", type=Path, nargs="+", help="training files; also gzip or zstd")
    add("--test", type=Path, help="test file, with --files")
    add("--data", type=Path, default=Path("criteo"), help="where to write made files")
    add("--rows", type=int, default=200_000, help="of the made training files")
    add("--parts", type=int, default=4, help="made training files")
    add("--hash-range", type=int, default=100_000, help="rows per categorical column")
    criteo_data.add_keys(parser)
    add("--open", action="store_true", help="no vocabulary: a row for any value")
    add("--count-filter", type=int, default=1, help="pushes before a value has a row")
    add("--max-rows", type=int, help="of the open table; above, the oldest ones go")
    add("--results", type=Path, help="file for trainer 0's figures, as JSON")
    add("--print-every", type=int, default=100, help="batches between lines")
    add("--batch-size", type=int, default=512, help="records of a trainer and step")
    add("--epochs", type=int, default=1, help="passes over the files")
    add("--threads", type=int, default=1, help="reader threads of a trainer")
    add("--lr", type=float, default=0.02, help="learning rate of Adagrad")
    add("--seed", type=int, default=1, help="of initial weights")
    names = [name for name in strategies.names() if name != "local_sgd"]
    add("--strategy", choices=names, default="sync", help="by name")
    options = parser.parse_args()
    if (options.files is None) != (options.test is None):
        parser.error("expected --files and --test together, or neither")
    if options.open and options.strategy not in OPEN_STRATEGIES:
        names = ", ".join(OPEN_STRATEGIES)
        parser.error(f"--open trains with {names}; found {options.strategy}")
    if not options.open and (options.count_filter > 1 or options.max_rows is not None):
        parser.error("--count-filter and --max-rows are for --open")
    return options


def main() -> None:
    """Serve or train, as the launch says."""
    options = parse_arguments()
    cpudist.init()
    if cpudist.is_server():
        cpudist.serve()
    else:
        train(options)
    cpudist.shutdown()


if __name__ == "__main__":
    main()
