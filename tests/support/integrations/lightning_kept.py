# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lightning's fit with checkpoints and snapshots, and what is left of both."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import lightning_cases as cases
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import torch_cpudist as cpudist
from torch_cpudist.integrations.lightning import CpudistStrategy
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

NAME = "bag.weight"


class Drops(cases.Clicks):
    """What it learns depends on torch's generator."""

    def loss(self, batch):
        loss = super().loss(batch)
        if not self.training:
            return loss
        return loss * torch.rand(()).add(0.5)

    def validation_step(self, batch, index):
        super().validation_step(batch, index)
        self.log("rises", float(self.current_epoch))

    test_step = cases.Clicks.validation_step

    def predict_step(self, batch, index):
        return self(batch[0])


def module(remote):
    made = Drops()
    return cpudist.shard_tables(made, remote=[NAME]) if remote else made


def loader():
    return cases.loader(shuffle=True)


def trainer(folder, kind, snapshots=True, **options):
    """One that saves nothing by itself, with a directory for snapshots."""
    where = Path(f"{folder}-snapshots") if snapshots else None
    return cases.trainer(CpudistStrategy(kind, snapshot_dir=where), **options)


def values_of(model):
    """Dense parameters and all rows, as the servers have them."""
    with torch.no_grad():
        rows = model.bag(torch.arange(cases.ROWS)[:, None]).clone()
    return {**cases.values(model), "rows": rows}


def all_values(made, model):
    for one in made.optimizers:
        one.flush()
    return values_of(model)


def fitted(
    folder, kind, remote, epochs, snapshots=True, ckpt_path=None, monitor=None, **saving
):
    """``fit`` with a checkpoint of every epoch, in the script's run."""
    torch.manual_seed(3 if ckpt_path is None else 4)
    saver = ModelCheckpoint(
        folder, filename="{epoch}", monitor=monitor, save_last=True, **saving
    )
    made = trainer(
        folder,
        kind,
        snapshots,
        callbacks=[saver],
        enable_checkpointing=True,
        max_epochs=epochs,
    )
    model = module(remote)
    made.fit(model, loader(), cases.loader(8, 2), ckpt_path=ckpt_path)
    return {
        "values": all_values(made, model),
        "steps": made.global_step,
        "seen": len(model.seen),
        "best": saver.best_model_path,
        "val": float(made.callback_metrics.get("val", torch.nan)),
        "module": model,
        "trainer": made,
    }


def predicted(made, model, file):
    """Scores of what a checkpoint has learned, by ``predict``."""
    return torch.cat(made.predict(model, cases.loader(8, 2), ckpt_path=file))


class Held(TorchCheckpointIO):
    """Writes when it may."""

    def __init__(self, patience_s):
        self.may, self.patience_s = threading.Event(), patience_s

    def save_checkpoint(self, *given, **named):
        assert self.may.wait(self.patience_s)
        super().save_checkpoint(*given, **named)


def fit_held(folder, patience_s, do):
    """Fits an epoch whose files are written when they may, with snapshots.

    ``do`` is called behind each batch: with the trainer, the batch's index, what lets
    files be written and waits for them, and what names the snapshots there are.
    """
    held, where = Held(patience_s), Path(f"{folder}-snapshots")
    outer = AsyncCheckpointIO(held)
    strategy = CpudistStrategy("sync", snapshot_dir=where, checkpoint_io=outer)
    made = cases.trainer(strategy, max_epochs=1)

    def written():
        held.may.set()
        outer.teardown()  # waits for the file
        held.may.clear()

    class Does(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            do(trainer, index, written, lambda: set(Directory(where).names()))

    made.callbacks.append(Does())
    made.fit(module(True), loader(), cases.loader(8, 2))


def saved_late(folder, patience_s):
    """The snapshots there are while a file that is saved again is not yet written."""
    found = {}

    def do(trainer, index, written, names):
        if index > 1:
            return
        trainer.save_checkpoint(f"{folder}.ckpt")
        found["first" if index == 0 else "held"] = names()
        if index == 1:
            found["before"] = set(record_of(f"{folder}.ckpt")["names"])
        written()

    fit_held(folder, patience_s, do)
    return found


def removed_late(folder, patience_s):
    """What is left of a file that is removed before it was written."""
    found = {}

    def do(trainer, index, written, names):
        if index:
            return
        trainer.save_checkpoint(f"{folder}.ckpt")
        trainer.strategy.remove_checkpoint(f"{folder}.ckpt")
        found["held"] = len(names())
        written()
        found["left"] = len(names())
        found["there"] = Path(f"{folder}.ckpt").exists()

    fit_held(folder, patience_s, do)
    return found


def record_of(file):
    return torch.load(file, weights_only=True)["cpudist_snapshots"]


def rows_of(folder):
    """Every column of the table in the snapshot of the last checkpoint."""
    (name,) = record_of(Path(folder, "last.ckpt"))["names"]
    snapshot = Snapshot(Path(f"{folder}-snapshots", name))
    assert snapshot.verify() == []
    if not snapshot.manifest.tables:
        return [
            (one.name, snapshot.dense(one.name).tolist())
            for one in snapshot.manifest.dense
        ]
    found = snapshot.rows(NAME, torch.arange(cases.ROWS).numpy())
    assert "state" in found.columns
    return {column: values.tolist() for column, values in found.columns.items()}


def fit_in_parts(context, report):
    """Two trainers: an epoch with a checkpoint, and in new objects one from there."""
    kind = os.environ["KIND"]
    strategy = cpudist.HalfAsync(group=[[0], [1]]) if kind == "groups" else kind
    where = Path(os.environ["CPUDIST_SNAPSHOT_DIR"])

    def fit(epochs, ckpt_path=None, **options):
        torch.manual_seed(7)
        model = module(remote=True)
        made = cases.trainer(
            CpudistStrategy(strategy, snapshot_dir=options.pop("snapshot_dir", None)),
            max_epochs=epochs,
            **options,
        )
        made.fit(model, cases.loader(), ckpt_path=ckpt_path)
        return made, model

    def end(made):
        cpudist.barrier()
        for one in made.optimizers:
            one.close()

    made, model = fit(2)
    whole = all_values(made, model)
    end(made)
    saver = ModelCheckpoint(where.parent / "files", filename="one")
    made, model = fit(1, callbacks=[saver], enable_checkpointing=True)
    before, steps = all_values(made, model), [made.global_step]
    end(made)
    # No epoch is left: what was saved is there.
    made, model = fit(1, saver.best_model_path)
    cpudist.barrier()
    back = all_values(made, model)
    end(made)
    made, model = fit(2, saver.best_model_path, snapshot_dir=where)
    steps.append(made.global_step)
    after = all_values(made, model)
    same = all(torch.equal(before[name], back[name]) for name in before)
    went_on = all(torch.equal(whole[name], after[name]) for name in whole)
    names = Directory(where).names()
    return {
        "same_rows": same,
        "steps": steps,
        "went_on": went_on if kind == "sync" else None,
        "names": names,
    }
