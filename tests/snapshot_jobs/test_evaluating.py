# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots are committed while trainers do something else than to step."""

from __future__ import annotations

import threading

import pytest
import torch
from patience import PATIENCE_S
from snapshot_cases import until
from snapshot_parity import seeing
from sync_cases import run
from torch.optim import lr_scheduler
from whole_gradients import check_files, model_of, push

import torch_cpudist as cpudist
from torch_cpudist.drivers.geo_saving import GeoSaving
from torch_cpudist.drivers.queued_saving import QueuedSaving
from torch_cpudist.drivers.served_saving import ServedSaving
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.trainer_files import read_trainer


def wrapped(strategy):
    model = model_of(remote=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, inner, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def test_async_commits_while_all_trainers_evaluate(tmp_path, monkeypatch):
    """Nobody calls anything after its mark, and nothing fails or is left out."""
    marked = [threading.Event() for _ in range(2)]
    known = QueuedSaving.mark

    def mark(self, *others):
        found = known(self, *others)
        marked[self._run.trainer_rank].set()
        return found

    monkeypatch.setattr(QueuedSaving, "mark", mark)

    def body(context):
        rank = context.trainer_rank
        model, _, opt = wrapped("async")
        opt.resume(tmp_path, every_steps=3)
        step = 0
        while not marked[rank].is_set():
            push(opt, model, rank, step)
            step += 1
        until(lambda: bool(Directory(tmp_path).names()), PATIENCE_S)
        until(lambda: opt.stats()["snapshot"]["saved"] == 1, PATIENCE_S)
        found = opt.stats()["snapshot"]
        assert (found["parts"], found["failed"], found["skipped"]) == (1, 0, 0)

    run(body, 2, variables=seeing(tmp_path))
    assert check_files(tmp_path, 1.0) == 1


HELD = {
    "async": cpudist.Async(),
    "bounded": cpudist.Async(max_staleness=1000),
    "geo": cpudist.Geo(push_every=3),
    "half_async": cpudist.HalfAsync(group=[[0], [1]]),
}


@pytest.mark.parametrize("strategy", HELD)
def test_an_evaluation_holds_nobody_at_a_snapshot(strategy, tmp_path, monkeypatch):
    """One is due while trainer 1 evaluates: trainer 0 trains on, and it comes then.

    Servers wait for markers far longer than this test may take.
    """
    begun, over, marks = threading.Event(), threading.Event(), []

    def noting(known):
        def mark(self, number, *others):
            marks.append((self._run.trainer_rank, number, over.is_set()))
            return known(self, number, *others)

        return mark

    for kind in (ServedSaving, QueuedSaving, GeoSaving):
        monkeypatch.setattr(kind, "mark", noting(kind.mark))

    def body(context):
        rank = context.trainer_rank
        model, _, opt = wrapped(HELD[strategy])
        opt.resume(tmp_path, every_steps=40)
        step = 0
        while step < (10 if rank else 39):
            push(opt, model, rank, step)
            step += 1
        if rank == 1:
            begun.set()
            assert over.wait(PATIENCE_S)  # it evaluates
        else:
            assert begun.wait(PATIENCE_S)
            for step in range(39, 79):
                push(opt, model, rank, step)
            step = 79
            assert Directory(tmp_path).names() == []
            over.set()
        while not Directory(tmp_path).names():
            push(opt, model, rank, step)
            step += 1
        told = opt.stats()["snapshot"]
        assert told["failed"] == 0
        opt.leave()
        return told["skipped"]

    skipped, _ = run(body, 2, variables=seeing(tmp_path))
    atol = 0.01 if strategy == "geo" else 0.0
    assert check_files(tmp_path, 1.0, atol=atol) >= 1
    first = Directory(tmp_path).names()[-1]
    # The moment is a later one, of the number that was due; who waited has marked anew.
    # One was skipped meanwhile; where others come back late, that as well, and the next
    # one is taken.
    assert skipped > 1 or Snapshot(tmp_path / first).manifest.number == marks[0][1]
    assert [one for one in marks if one[0] == 0][1][1:] == (marks[0][1], True)
    assert all(rank == 0 for rank, _, released in marks if not released)


def made(kind, inner):
    """A schedule of that kind, which goes on with every step."""
    if kind == "plateau":
        return lr_scheduler.ReduceLROnPlateau(inner, patience=1)
    parts = [lr_scheduler.ConstantLR(inner, 0.5, 50) for _ in range(2)]
    if kind == "chained":
        return lr_scheduler.ChainedScheduler(parts)
    if kind == "sequential":
        return lr_scheduler.SequentialLR(inner, parts, [2])
    return lr_scheduler.ExponentialLR(inner, 0.5)


def stepped(kind, schedule):
    """One step of it."""
    schedule.step(1.0) if kind == "plateau" else schedule.step()


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("kind", ["plain", "sequential", "chained", "plateau"])
def test_an_evaluation_after_the_schedule_keeps_no_snapshot(kind, strategy, tmp_path):
    """It has the schedule as it is after the step, as if the next one had begun."""

    def body(_):
        model, inner, opt = wrapped(strategy)
        schedule = made(kind, inner)
        opt.resume(tmp_path, every_steps=4, state={"schedule": schedule})
        for step in range(4):
            push(opt, model, 0, step)
            assert Directory(tmp_path).names() == []  # not before the schedule's step
            stepped(kind, schedule)
        until(lambda: bool(Directory(tmp_path).names()), PATIENCE_S)
        return schedule.state_dict()

    [expected] = run(body, 1, variables=seeing(tmp_path))
    [name] = Directory(tmp_path).names()
    snapshot = Snapshot(tmp_path / name)
    [trainer] = snapshot.manifest.trainers
    tree = read_trainer(tmp_path / name, trainer, snapshot.files)
    saved = tree["own"]["objects"]["schedule"]
    assert saved["_last_lr"] == expected["_last_lr"]
    if kind in ("chained", "sequential"):
        for one, other in zip(
            saved["_schedulers"], expected["_schedulers"], strict=True
        ):
            assert one["last_epoch"] == other["last_epoch"]
    else:
        assert saved["last_epoch"] == expected["last_epoch"]


def test_a_schedule_of_epochs_keeps_no_snapshot(tmp_path):
    """Nothing is to come of it within an epoch."""

    def body(_):
        model, inner, opt = wrapped("sync")
        schedule = lr_scheduler.ExponentialLR(inner, 0.5)
        opt.resume(tmp_path, every_steps=4, state={"schedule": schedule})
        for step in range(4):
            push(opt, model, 0, step)
        until(lambda: bool(Directory(tmp_path).names()), PATIENCE_S)

    run(body, 1, variables=seeing(tmp_path))
