# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains a click-through model on files in Criteo's format.

Without ``--files`` it writes files of that format whose labels a hidden model draws, so
there is an AUC to reach. Runs by itself, under torchrun with any number of trainers,
and with dedicated servers (CPUDIST_SERVERS); every trainer reads its share.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import criteo_data
import torch
import torch.nn.functional as F
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import strategies
from torch_cpudist.data import QueueDataset, criteo_slots

CATEGORIES = [f"C{number}" for number in range(1, criteo_data.CATEGORIES + 1)]
Batch = dict[str, torch.Tensor]


class CtrDnn(nn.Module):
    """Embeddings of all categorical values and the numbers, through a network."""

    def __init__(self, hash_range: int, dim: int = 16) -> None:
        """Make one table for all columns, `hash_range` rows each, and the network."""
        super().__init__()
        columns = len(CATEGORIES)
        self.table = nn.Embedding(columns * hash_range, dim, sparse=True)
        self.register_buffer("first", torch.arange(columns) * hash_range)
        width = columns * dim + criteo_data.NUMBERS
        self.network = nn.Sequential(
            nn.Linear(width, 400),
            nn.ReLU(),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 400),
            nn.ReLU(),
            nn.Linear(400, 1),
        )
        nn.init.normal_(self.table.weight, std=0.01)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return logits ``[n]``."""
        ids = torch.stack([batch[name].ids for name in CATEGORIES], dim=1)
        rows = self.table(ids + self.first).flatten(1)
        numbers = torch.log1p(batch["dense"].clamp(min=0))
        logits: torch.Tensor = self.network(torch.cat([rows, numbers], dim=1))
        return logits.squeeze(1)


def dataset(files: list[Path], options: argparse.Namespace, epoch_shuffle: bool):
    """Return a reader of this trainer's share of some files."""
    return QueueDataset(
        files,
        criteo_slots(hash_range=options.hash_range),
        format="criteo",
        batch_size=options.batch_size,
        shuffle=epoch_shuffle,
        threads=options.threads,
        bad_lines="skip",
    )


def train(options: argparse.Namespace) -> None:
    """Train on the files and measure on the test file; every trainer calls this."""
    ceiling = None
    if options.files is None:
        if cpudist.trainer_rank() == 0:
            criteo_data.prepare(options.data, options.rows, options.parts)
        cpudist.barrier()
        made = criteo_data.prepare(options.data, options.rows, options.parts)
        options.files, options.test, ceiling = (
            made["train"],
            made["test"],
            made["ceiling"],
        )
    torch.manual_seed(options.seed)
    model = CtrDnn(options.hash_range)
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
        step, reader, epochs=options.epochs, fetch=["loss"], print_every=100
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
        print(
            f"{run.samples_per_s:,.0f} samples/s per trainer, "
            f"{run.waiting_share:.1%} of the time waiting for data"
        )
        of = "" if ceiling is None else f" of at most {ceiling:.4f}"
        found = test.metrics
        print(f"test: AUC {found['auc']:.4f}{of}, log loss {found['log_loss']:.4f}")


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
