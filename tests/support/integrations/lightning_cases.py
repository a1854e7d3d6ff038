# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lightning modules of an everyday kind, and what two trainers do with them."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torch_cpudist as cpudist
from torch_cpudist.integrations.lightning import CpudistStrategy

# What it recommends does not concern tests, and each line of it is a line of theirs.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

__all__ = ["CUDAAccelerator", "ModelCheckpoint", "Tuner"]  # for tests

ROWS, BATCH, SAMPLES = 60, 4, 48


class Clicks(lightning.LightningModule):
    """Automatic optimization; knows nothing of servers."""

    def __init__(self, sparse=True, kind="adagrad"):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=sparse)
        self.score = nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.kind = kind
        self.seen = []

    def forward(self, ids):
        return self.score(self.bag(ids)).squeeze(1)

    def loss(self, batch):
        ids, y = batch
        return F.binary_cross_entropy_with_logits(self(ids), y)

    def training_step(self, batch, index):
        self.seen += batch[0][:, 0].tolist()
        loss = self.loss(batch)
        self.log("rank", float(self.global_rank + 1), sync_dist=True)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def optimizer_of(self, parameters):
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(parameters)
        return torch.optim.Adagrad(parameters, lr=0.1)

    def configure_optimizers(self):
        made = self.optimizer_of(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        return {"optimizer": made, "lr_scheduler": schedule}


class ByHand(Clicks):
    """Manual optimization: an optimizer of the table and one of the rest."""

    def __init__(self, sparse=True, clip=None):
        super().__init__(sparse)
        self.automatic_optimization = False
        self.clip = clip

    def training_step(self, batch, index):
        both = self.optimizers()
        for one in both:
            one.zero_grad()
        self.manual_backward(self.loss(batch))
        for one in both:
            if self.clip is not None:
                self.clip_gradients(one, self.clip, "norm")
            one.step()

    def configure_optimizers(self):
        parts = (self.bag, self.score)
        return [self.optimizer_of(part.parameters()) for part in parts]


def data(samples=SAMPLES, seed=1):
    """A dataset whose samples are told apart by their first id."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(ROWS, (samples, 3), generator=generator)
    ids[:, 0] = torch.arange(samples) % ROWS
    return TensorDataset(ids, (ids.sum(1) % 2).float())


def loader(samples=SAMPLES, seed=1, **options):
    return DataLoader(data(samples, seed), batch_size=BATCH, **options)


def trainer(strategy, **options):
    """A Trainer that prints nothing."""
    quiet = {
        **{"logger": False, "enable_progress_bar": False},
        **{"enable_model_summary": False, "enable_checkpointing": False},
    }
    options = {"accelerator": "cpu", "max_epochs": 2} | quiet | options
    return lightning.Trainer(strategy=strategy, **options)


def values(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def plain_loop(context, epochs=2, **options):
    """What ``fit`` is to be, with the five calls of this package."""
    module = Clicks()
    inner = torch.optim.Adagrad(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    opt = cpudist.DistributedOptimizer(inner, module, **options)
    dataset = data()
    sampler = DistributedSampler(dataset)  # as Lightning makes one
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
            opt.zero_grad()
            module.loss(batch).backward()
            opt.step()
        schedule.step()
    cpudist.barrier()
    opt.flush()
    found = values(module)
    opt.close()
    return found


class StopAt(Callback):
    """One trainer wants to end after an epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        wanted = trainer.global_rank == 1 and trainer.current_epoch == 1
        if trainer.strategy.reduce_boolean_decision(wanted, all=False):
            trainer.should_stop = True


def fit_as_the_loop(context, report):
    """Two trainers under Sync: the loop's bits, ranks, shares, means and files."""
    expected = plain_loop(context, clip=cpudist.ClipNorm(0.5))
    folder = Path("checkpoints")
    saver = ModelCheckpoint(folder, filename="last", every_n_epochs=1)
    made = trainer(
        CpudistStrategy("sync"),
        callbacks=[saver],
        enable_checkpointing=True,
        gradient_clip_val=0.5,
        devices="auto" if context.trainer_rank else 2,
    )
    module = Clicks()
    made.fit(module, loader(), loader(8, 2))
    saved = torch.load(saver.best_model_path, weights_only=True)
    return {
        "same_bits": all(
            torch.equal(value, expected[name]) for name, value in values(module).items()
        ),
        "saved_bits": all(
            torch.equal(value, saved["state_dict"][name])
            for name, value in values(module).items()
        ),
        "state": sorted(saved["optimizer_states"][0]["state"]),
        "numbers": [made.global_rank, made.world_size],
        "hosts": [made.num_devices, made.num_nodes],
        "zero": made.is_global_zero,
        "files": sorted(file.name for file in folder.iterdir()),
        "seen": module.seen[: SAMPLES // 2],  # in the first epoch
        "steps": made.global_step,
        "rank": float(made.callback_metrics["rank"]),
        "val": float(made.callback_metrics["val"]),
        "val_alone": float(module.loss(data(8, 2)[:]).detach()),
        "open": [not one.closed for one in made.optimizers],
    }


def fit_async(context, report):
    """Two trainers under Async, who stop when one of them says so, and go on."""
    made = trainer(
        CpudistStrategy("async"),
        max_epochs=9,
        accumulate_grad_batches=2,
        callbacks=[StopAt(), EarlyStopping("val", patience=9)],
    )
    module = Clicks()
    made.fit(module, loader(), loader(8, 2))
    text = made.strategy.broadcast({"of": [made.global_rank, Path("a").name, None]})
    path = made.strategy.broadcast(Path(f"from-{made.global_rank}"))
    refused = ""
    try:
        made.strategy.broadcast(object())
    except cpudist.InvalidArgumentError as error:
        refused = str(error)
    tested = made.test(module, loader(8, 2), verbose=False)
    rank = torch.tensor(made.global_rank)
    gathered = made.strategy.all_gather(rank.float())
    return {
        "epochs": made.current_epoch,
        "val": float(made.callback_metrics["val"]),
        "tested": tested[0]["val"],
        "weights": float(sum(v.double().sum() for v in values(module).values())),
        "text": text,
        "path": str(path),
        "refused": refused,
        "gathered": gathered.tolist(),
        "most": float(
            made.strategy.reduce(torch.tensor(made.global_rank), None, "max")
        ),
    }


class Failing(Clicks):
    """Trainer 1's data is broken."""

    def training_step(self, batch, index):
        if self.global_rank == 1 and index == 2:
            raise ValueError("a broken batch")
        return super().training_step(batch, index)


def fail_alone(context, report):
    """What the others see of a trainer whose step raises."""
    try:
        trainer(CpudistStrategy()).fit(Failing(), loader())
    except Exception as error:
        report({"type": type(error).__name__, "text": str(error)})
        raise
