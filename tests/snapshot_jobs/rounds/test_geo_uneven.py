# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo with an outer optimizer: saves beside trainers that pause, or end early."""

from __future__ import annotations

import threading

import pytest
import torch
from geo_rounds_cases import check_movement, geo, trees
from patience import PATIENCE_S
from snapshot_cases import until
from snapshot_parity import seeing
from sync_cases import run
from whole_gradients import model_of, push

import torch_cpudist as cpudist
from torch_cpudist.drivers.geo_rounds_saving import GeoRoundsSaving
from torch_cpudist.resuming.paces import Waits
from torch_cpudist.resuming.saves import Saves
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot


class Trainer:
    """One that moves by whole numbers, at its own pace."""

    def __init__(self, rank, folder, every):
        self.rank, self.made = rank, 0
        self.model = model_of(remote=False)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        strategy = geo(push_every=3, outer=cpudist.Outer(lr=1.0))
        self.opt = cpudist.DistributedOptimizer(inner, self.model, strategy=strategy)
        self.opt.resume(folder, every_steps=every)

    def step(self, count=1):
        for _ in range(count):
            push(self.opt, self.model, self.rank, self.made)
            self.made += 1

    def step_until(self, true):
        end = threading.Event()
        timer = threading.Timer(PATIENCE_S, end.set)
        timer.start()
        while not true():
            assert not end.is_set()
            self.step()
        timer.cancel()

    @property
    def counts(self):
        return self.opt.stats()["snapshot"]


@pytest.fixture
def marks(monkeypatch):
    """Which trainers have marked what, in this order."""
    made, known = [], GeoRoundsSaving.mark

    def mark(self, number, *others):
        made.append((self._run.trainer_rank, number))
        return known(self, number, *others)

    monkeypatch.setattr(GeoRoundsSaving, "mark", mark)
    return made


def step_until_marked(trainer, pauses, marks):
    """Trainer 0, beside one that pauses, up to its first mark."""
    assert pauses.wait(PATIENCE_S)
    trainer.step_until(lambda: marks)


def test_a_long_pause_holds_nobody_and_the_snapshot_comes_after_it(tmp_path, marks):
    """Trainer 1 has handed on what ends the round, and takes it in after its pause."""
    pauses, over = threading.Event(), threading.Event()

    def body(context):
        trainer = Trainer(context.trainer_rank, tmp_path, 2)
        if trainer.rank == 1:
            trainer.step(3)
            pauses.set()
            assert over.wait(PATIENCE_S)
        else:
            step_until_marked(trainer, pauses, marks)
            assert marks[0][0] == 0
            marked = trainer.made
            trainer.step(40)
            assert Directory(tmp_path).names() == []
            over.set()
        trainer.step_until(lambda: Directory(tmp_path).names())
        if trainer.rank == 0:
            until(lambda: trainer.counts["saved"] > 0, PATIENCE_S)
            first = Directory(tmp_path).names()[-1]
            found = Directory(tmp_path).manifest(first).trainers
            # Of the moments that each has come to, however long ago.
            assert [one.steps for one in found] == [marked, 4]
        assert trainer.counts["failed"] == 0

    run(body, 2, servers=2, variables=seeing(tmp_path))
    assert check_movement(tmp_path) > 0


@pytest.mark.parametrize("taken_by", ["the thread that writes", "who steps"])
def test_who_pauses_too_long_costs_that_snapshot_alone(
    taken_by, tmp_path, marks, monkeypatch
):
    """It is given up and counted; training goes on, and the next one is whole.

    Whichever thread learns that it was given up: an exchange waits for trainer 1 then.
    """
    if taken_by == "who steps":
        monkeypatch.setattr(Saves, "watch", lambda self: None)
    known, begin, begun = Waits.wait_ms, Directory.begin, []
    monkeypatch.setattr(Waits, "wait_ms", lambda self, at_once: 300)
    monkeypatch.setattr(
        Directory, "begin", lambda self, name: (begun.append(name), begin(self, name))
    )
    pauses, over = threading.Event(), threading.Event()

    def body(context):
        trainer = Trainer(context.trainer_rank, tmp_path, 2)
        if trainer.rank == 1:
            trainer.step(3)
            pauses.set()
            assert over.wait(PATIENCE_S)
        else:
            step_until_marked(trainer, pauses, marks)
            first = marks[0][1]
            # Its directory, which was made before, goes when servers have given it up:
            # maybe they have by now.
            assert [name for name in begun if f"0{first}-" in name]
            trainer.step_until(lambda: not list(tmp_path.glob(f"snap-*0{first}-*")))
            assert trainer.counts["skipped"] > 0
            monkeypatch.setattr(Waits, "wait_ms", known)
            over.set()
        trainer.step_until(lambda: Directory(tmp_path).names())
        assert trainer.counts["failed"] == 0

    run(body, 2, servers=2, variables=seeing(tmp_path))
    assert check_movement(tmp_path) > 0
    first = min(number for _, number in marks)
    for name in Directory(tmp_path).names():
        assert Directory(tmp_path).manifest(name).number > first
        assert len(trees(tmp_path, name)) == 2


def test_who_ends_early_keeps_nobody_and_saves_go_on_when_it_is_back(tmp_path):
    """Those of the time between are counted: none is without where it was."""
    left, enough = threading.Event(), threading.Event()

    def body(context):
        trainer = Trainer(context.trainer_rank, tmp_path, 4)
        trainer.step_until(lambda: Directory(tmp_path).names())
        gone = trainer.made
        if trainer.rank == 1:
            trainer.opt.leave()
            left.set()
            assert enough.wait(PATIENCE_S)
        else:
            trainer.step_until(left.is_set)
            before = trainer.counts["skipped"]
            trainer.step_until(lambda: trainer.counts["skipped"] > before + 1)
            assert trainer.counts["failed"] == 0
            enough.set()

        def has_both():
            if trainer.rank == 0:
                return over.is_set()
            name = Directory(tmp_path).names()[0]
            try:
                newest = Directory(tmp_path).manifest(name).trainers
            except cpudist.SnapshotError:  # later ones have come, and it has gone
                return False
            return newest[1].steps > gone

        trainer.step_until(has_both)
        over.set()
        assert trainer.counts["failed"] == 0

    over = threading.Event()
    run(body, 2, servers=2, variables=seeing(tmp_path))
    for name in Directory(tmp_path).names():
        assert Snapshot(tmp_path / name).verify() == []
        assert len(trees(tmp_path, name)) == 2


def test_what_the_script_saves_when_one_has_ended_says_whom_it_lacks(tmp_path):
    ended = threading.Event()

    def body(context):
        trainer = Trainer(context.trainer_rank, tmp_path, None)
        trainer.step(4)
        if trainer.rank == 1:
            ended.set()
            return
        assert ended.wait(PATIENCE_S)
        trainer.step(8)
        with pytest.raises(cpudist.SnapshotError, match=r"'named'.*trainers \[1\]"):
            trainer.opt.save_snapshot("named")
        trainer.step(4)

    run(body, 2, servers=2, variables=seeing(tmp_path))
    assert Directory(tmp_path).names() == []
