# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots while trainers have left: with the states that these have left behind."""

from __future__ import annotations

import random
import shutil
import time

import pytest
import torch
from patience import PATIENCE_S
from snapshot_cases import settle, until
from snapshot_parity import seeing
from sync_cases import run
from turns import Turns
from whole_gradients import (
    ROWS,
    Rounds,
    check_files,
    expected,
    model_of,
    push,
    saved_values,
)

import torch_cpudist as cpudist
from torch_cpudist.drivers.served_saving import ServedSaving
from torch_cpudist.resuming.marking import Marks
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.left_files import LeftFiles
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.trees import pack


def wrapped(kind, remote=False):
    model = model_of(remote)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=kind)


def steps_of(folder):
    return [one.steps for one in Snapshot(folder).manifest.trainers]


@pytest.mark.parametrize(("kind", "saver"), [("async", 0), ("sync", 0), ("sync", 1)])
def test_saves_with_what_one_has_left_behind(kind, saver, tmp_path):
    """Trainer 0 commits, and where all mark by themselves the first that is there."""
    turns, rounds = Turns(), Rounds()

    def body(context):
        rank = context.trainer_rank
        model, opt = wrapped(kind)
        opt.resume(tmp_path)
        done = 0

        def train(count):
            nonlocal done
            for _ in range(count):
                push(opt, model, rank, done)
                rounds.note(opt.rounds, rank, done)
                done += 1

        train(1)
        if rank != saver:
            opt.leave()
            turns.over("left")
            turns.wait("saved")
            train(2)  # is back
            opt.leave()
            turns.over("left again")
            turns.wait("saved again")
            return
        turns.wait("left")
        train(1)
        assert opt.save_snapshot("part") == "part"
        turns.over("saved")
        while kind == "sync" and not turns.is_over("left again"):
            train(1)  # whoever is back waits for a round of both
        turns.wait("left again")
        train(3)
        opt.save_snapshot("again")
        turns.over("saved again")
        found = opt.stats()["snapshot"]
        assert (found["saved"], found["skipped"], found["failed"]) == (2, 0, 0)

    run(body, 2)
    assert steps_of(tmp_path / "part")[1 - saver] == 1
    assert steps_of(tmp_path / "again")[1 - saver] == 3
    if kind == "async":
        assert check_files(tmp_path, 1.0) == 2
    for name in ("part", "again") if kind == "sync" else ():
        snapshot = Snapshot(tmp_path / name)
        assert snapshot.verify() == []
        table, dense, counts = rounds.expected(snapshot.manifest.number)
        assert counts[:2] == steps_of(tmp_path / name)
        weight, values = saved_values(snapshot)
        assert torch.equal(weight, table)
        assert torch.equal(values, dense)


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_snapshot_is_of_all_trainers(kind, late, tmp_path, monkeypatch):
    """Else what one that has left has learned would be learned again.

    ``late``: who writes has given it up before who asked for it looks.
    """
    turns = Turns()
    asked = []
    known = Marks.await_answers

    def awaits(marks, *others):
        known(marks, *others)
        until(lambda: asked[0].stats()["snapshot"]["skipped"] == 1, PATIENCE_S)

    if late:
        monkeypatch.setattr(Marks, "await_answers", awaits)

    def body(context):
        model, opt = wrapped(kind)
        opt.resume(tmp_path)
        push(opt, model, context.trainer_rank, 0)
        if context.trainer_rank == 1:
            opt.leave()
            for folder in tmp_path.glob("left_*"):
                shutil.rmtree(folder)  # a disk was full, say
            turns.over("left")
            turns.wait("over")
            return
        turns.wait("left")
        push(opt, model, 0, 1)
        asked.append(opt)
        try:
            with pytest.raises(cpudist.SnapshotError, match=r"trainers \[1\]"):
                opt.save_snapshot("part")
        finally:
            turns.over("over")
        found = opt.stats()["snapshot"]
        assert (found["saved"], found["skipped"]) == (0, 1)

    run(body, 2)
    assert Directory(tmp_path).names() == []
    assert Directory(tmp_path).uncommitted() == [], list(tmp_path.rglob("*"))


def test_a_state_of_a_later_time_is_not_taken(tmp_path):
    """What a trainer writes that was back meanwhile is not of the cut."""
    turns = Turns()

    def body(context):
        model, opt = wrapped("async")
        opt.resume(tmp_path)
        rank = context.trainer_rank
        push(opt, model, rank, 0)
        if rank == 1:
            opt.leave()
            left = LeftFiles(tmp_path, context.run_id, 0, Files())
            left.write(1, pack({}, "state"), 2)  # as if it had made another step since
            turns.over("left")
            turns.wait("over")
            return
        turns.wait("left")
        try:
            with pytest.raises(cpudist.SnapshotError, match="left again"):
                opt.save_snapshot("part")
        finally:
            turns.over("over")

    run(body, 2)
    assert Directory(tmp_path).names() == []
    assert Directory(tmp_path).uncommitted() == []


def async_job(folder, steps, seed, every, remote=False, servers=2):
    """Trainers of Async that come and go; where each began, and what all end with."""
    turns = Turns()

    def body(context):
        rank = context.trainer_rank
        drawn = random.Random(100 * seed + rank)
        model, opt = wrapped("async", remote)
        started = opt.resume(folder, every_steps=every)
        for step in range(started.step, steps[rank]):
            push(opt, model, rank, step)
            if drawn.random() < 0.15:
                opt.leave()
                if drawn.random() < 0.5:
                    opt.leave()
                time.sleep(0.01 * drawn.random())  # others save meanwhile
        cpudist.barrier()
        opt.flush()
        with torch.no_grad():
            rows = model.table(torch.arange(ROWS)).clone()
        settle(opt)
        turns.have_one(opt, rank, len(steps), folder)
        return started, rows, model.dense.detach().clone(), opt.stats()["snapshot"]

    return run(body, len(steps), servers=servers, variables=seeing(folder))


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize("seed", range(3))
def test_async_trainers_come_and_go_at_random(seed, remote, tmp_path):
    """No step is lost and none is there twice, in any snapshot and after it."""
    first = [45, 60, 25]
    for *_, stats in async_job(tmp_path, first, seed, 3, remote):
        assert stats["failed"] == 0
    assert check_files(tmp_path, 1.0) > 0
    last = [70, 66, 64]
    table, dense = expected(last)
    for started, rows, values, _ in async_job(tmp_path, last, seed + 50, 4, remote):
        assert started.step > 0
        assert torch.equal(rows, table)
        assert torch.equal(values, dense)
    check_files(tmp_path, 1.0)
    assert len(list(tmp_path.glob("left_*"))) == 1  # the first run's went


@pytest.mark.parametrize("seed", range(3))
def test_sync_trainers_come_and_go_at_random(seed, tmp_path):
    rounds = Rounds()
    steps = [40, 30]

    def body(context):
        rank = context.trainer_rank
        drawn = random.Random(10 * seed + rank)
        model, opt = wrapped("sync")
        opt.resume(tmp_path, every_steps=3, keep=50)
        for step in range(steps[rank]):
            push(opt, model, rank, step)
            rounds.note(opt.rounds, rank, step)
            settle(opt)
            if drawn.random() < 0.2:
                opt.leave()
                time.sleep(0.01 * drawn.random())
        settle(opt)
        return opt.stats()["snapshot"]

    found = run(body, 2)
    names = Directory(tmp_path).names()
    assert len(names) > 3, found
    assert sum(one["failed"] for one in found) == 0
    for name in names:
        snapshot = Snapshot(tmp_path / name)
        assert snapshot.verify() == []
        table, dense, counts = rounds.expected(snapshot.manifest.number)
        assert [one.steps for one in snapshot.manifest.trainers] == counts[:2]
        weight, values = saved_values(snapshot)
        assert torch.equal(weight, table)
        assert torch.equal(values, dense)


class Unwritable:
    """Something of the loop whose state no file can hold, on one trainer."""

    def __init__(self, bad) -> None:
        self._bad = bad

    def state_dict(self):
        return {"what": {1, 2} if self._bad else 1}

    def load_state_dict(self, state):
        """Nothing."""


def test_a_cut_that_its_leader_has_given_up_meanwhile(tmp_path, monkeypatch):
    """Who asks who commits it may find that servers have forgotten it."""
    known = ServedSaving.members

    def late(self, number):
        until(lambda: not self._opened.cut_status(0, number)["members"], PATIENCE_S)
        return known(self, number)

    def body(context):
        rank = context.trainer_rank
        model, opt = wrapped("sync")
        opt.resume(tmp_path, every_steps=1, state={"x": Unwritable(rank == 0)})
        if rank == 1:
            monkeypatch.setattr(ServedSaving, "members", late)
        for step in range(2):
            push(opt, model, rank, step)
            settle(opt)
        told = "still being written"
        while told == "still being written":  # by a server, of the one before
            with pytest.raises(cpudist.SnapshotError) as raised:
                opt.save_snapshot("mine")
            if told not in str(raised.value):
                told = str(raised.value)
        return told, opt.stats()["snapshot"]["saved"]

    (first, none), (second, none_either) = run(body, 2)
    assert none == none_either == 0
    assert "builtins.set" in first
    assert "given it up" in second
    assert Directory(tmp_path).uncommitted() == []


class Failing:
    """Something of the loop that fails when it is asked late."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self):
        if self.fails:
            raise KeyError("what")
        return {}

    def load_state_dict(self, state):
        """Nothing."""


def test_a_trainer_leaves_whatever_its_state_does(tmp_path, caplog):
    """Else the others would wait for it in a barrier."""

    def body(context):
        model, opt = wrapped("sync")
        state = Failing()
        opt.resume(tmp_path, state={"x": state})
        push(opt, model, context.trainer_rank, 0)
        state.fails = True
        opt.leave()
        cpudist.barrier()

    run(body, 2)
    assert "until it is back there are no snapshots: KeyError" in caplog.text
