# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots go on without trainers that have ended, also when servers come back.

Of each trainer all gradients are equal, so that values say how many were applied.
"""

from __future__ import annotations

import logging
import threading
import time

import pytest
from counting import counted, step, wrapped
from own_jobs import own_jobs
from patience import PATIENCE_S
from returning import WAITS, until_back
from snapshot_cases import until
from snapshot_parity import seeing

import torch_cpudist as cpudist
from torch_cpudist.resuming import saves
from torch_cpudist.snapshot.reading import Snapshot

STRATEGIES = ["async", "geo"]


def steps_of(folder):
    return {one.rank: one.steps for one in Snapshot(folder).manifest.trainers}


def started(jobs, body):
    """Two trainers, by id."""
    trainers = {}
    for name in "ab":
        job = jobs.trainer(name, body)
        until(job.ready.is_set, PATIENCE_S)
        trainers[job.context.trainer_rank] = job
    return trainers


class Two:
    """Trainer 1 makes three steps and ends; trainer 0 trains on and saves."""

    def __init__(self, strategy):
        self.strategy = strategy
        self.begun, self.saved = threading.Event(), threading.Event()
        self.ended, self.back = threading.Event(), threading.Event()
        self.both = threading.Barrier(2)
        self.refused = []

    def wrapped(self):
        model, opt = wrapped("static", self.strategy)
        return model, opt, opt.resume()

    def begin(self, rank, opt, model):
        """Both are part of a snapshot, after their third step."""
        for _ in range(3):
            step(opt, model, rank)
        opt.flush("none")
        self.both.wait(PATIENCE_S)
        if rank == 0:
            opt.save_snapshot("both")
            self.saved.set()
        while not self.saved.is_set():
            opt.flush("none")
            step(opt, model, rank)

    def save(self, opt, model, name):
        """Saves as soon as that is not refused any more."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            step(opt, model, 0)
            try:
                return opt.save_snapshot(name)
            except cpudist.SnapshotError as error:
                assert time.monotonic() < until_s
                self.refused.append(str(error))
                time.sleep(0.05)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_has_said_goodbye_is_not_waited_for_by_servers_that_come_back(
    strategy, tmp_path
):
    two = Two(strategy)
    made = {}

    def body(context):
        rank = context.trainer_rank
        model, opt, _ = two.wrapped()
        two.begin(rank, opt, model)
        if rank == 1:
            made[1] = opt.stats()["steps"]
            return None
        assert two.ended.wait(PATIENCE_S)
        opt.save_snapshot("one")
        two.begun.set()
        for life in range(2):
            until_back(opt, model, 0)
            assert opt.save_snapshot(f"again{life}") == f"again{life}"
            two.back.set()
        return opt.stats()["snapshot"], counted(opt, model)

    with own_jobs(2, **seeing(tmp_path), **WAITS) as jobs:
        trainers = started(jobs, body)
        trainers[1].result()
        two.ended.set()
        jobs.wait(two.begun)
        for _ in range(2):
            two.back.clear()
            jobs.kill_server()
            jobs.restart_server(CPUDIST_REJOIN_S=str(int(PATIENCE_S)))
            jobs.wait(two.back)
        found, values = trainers[0].result()
    assert (found["skipped"], found["failed"]) == (0, 0)
    for name in ("one", "again0", "again1"):
        assert steps_of(tmp_path / name)[1] == made[1], name
        assert Snapshot(tmp_path / name).verify() == []
    assert {some[1] for some in values} == {made[1]}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_is_lost_is_waited_for_as_long_as_servers_say(strategy, tmp_path, caplog):
    two = Two(strategy)

    def body(context):
        rank = context.trainer_rank
        model, opt, before = two.wrapped()
        if before.step > 0:
            return before.step, before.report
        two.begin(rank, opt, model)
        if rank == 1:
            context.abort("the test has killed it")
            return None
        two.save(opt, model, "without")
        two.back.set()
        while not two.ended.is_set():
            step(opt, model, 0)
        return None

    with (
        caplog.at_level(logging.WARNING),
        own_jobs(2, **seeing(tmp_path), CPUDIST_REJOIN_S="1") as jobs,
    ):
        trainers = started(jobs, body)
        jobs.wait(two.back)
        again = jobs.trainer(trainers[1].name, body)
        step_then, told = again.result()
        two.ended.set()
        trainers[0].result()
    assert two.refused
    waits = "[1] were lost, and until they are back"
    in_part = "trainer 1 was lost, or has ended, before its part was written"
    assert all(waits in one or in_part in one for one in two.refused)
    assert "snapshots go on without trainers [1]" in caplog.text
    both, without = steps_of(tmp_path / "both"), steps_of(tmp_path / "without")
    assert without[1] == both[1] == step_then
    assert "of snapshot without" in told[-1]
    assert Snapshot(tmp_path / "without").verify() == []


def test_a_part_of_who_is_lost_is_not_waited_for(tmp_path, monkeypatch):
    """It has marked the moment, and is killed before it has written."""
    two, marked = Two("async"), threading.Event()
    known = saves.write_trainer

    def write(folder, rank, *arguments, **others):
        if two.saved.is_set() and rank == 1:
            marked.set()
            raise cpudist.SnapshotError("the test has killed it")
        return known(folder, rank, *arguments, **others)

    monkeypatch.setattr(saves, "write_trainer", write)

    def body(context):
        rank = context.trainer_rank
        model, opt, _ = two.wrapped()
        two.begin(rank, opt, model)
        while rank == 1:
            step(opt, model, rank)
        with pytest.raises(cpudist.SnapshotError, match="trainer 1 was lost"):
            opt.save_snapshot("torn")

    with own_jobs(2, **seeing(tmp_path), CPUDIST_REJOIN_S="1") as jobs:
        trainers = started(jobs, body)
        jobs.wait(marked)
        trainers[1].end()
        trainers[0].result()
