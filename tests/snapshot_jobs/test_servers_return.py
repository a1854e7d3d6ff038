# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Servers in a job of their own are lost and come back: Async trainers go on.

Of each trainer all gradients are equal, so that values say how many were applied.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading

import pytest
from counting import counted, step, wrapped
from meeting_points import store_at
from own_jobs import own_jobs
from patience import PATIENCE_S
from returning import (
    WAITS,
    Lives,
    at_a_barrier,
    check,
    flushed,
    looked_up,
    lost_again_while_loading,
    stepped,
    until_back,
)
from snapshot_cases import until
from snapshot_parity import seeing

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files

MEETS = [
    ("static", looked_up),
    ("static", stepped),
    ("remote", stepped),
    ("dense", stepped),
    ("remote", flushed),
    ("static", at_a_barrier),
]


def without_servers(jobs, lives):
    """Trainers that go on while their servers are killed and started again."""
    trainers = [jobs.trainer(name, lives.body) for name in "ab"]
    lives.wait(jobs)
    jobs.kill_server()
    lives.go[0].set()
    jobs.restart_server(**WAITS)
    return trainers


@pytest.mark.parametrize(("kind", "again"), MEETS)
def test_trainers_go_on_and_what_is_lost_is_counted(kind, again, tmp_path, caplog):
    lives = Lives(kind, again=again)
    with (
        caplog.at_level(logging.WARNING),
        own_jobs(2, **seeing(tmp_path), **WAITS) as jobs,
    ):
        found = [one.result() for one in without_servers(jobs, lives)]
    check(found)
    told = [r.getMessage() for r in caplog.records]
    assert (
        len([one for one in told if "values of snapshot kept0. Lost are" in one]) == 2
    )


@pytest.mark.parametrize("saves", [1, 2])
def test_what_is_lost_twice_counts_once(saves, tmp_path):
    """They come back a second time, from a newer snapshot or from the same."""
    lives = Lives(lives=3, saves=saves, again=until_back)
    with own_jobs(2, **seeing(tmp_path), **WAITS) as jobs:
        trainers = [jobs.trainer(name, lives.body) for name in "ab"]
        for life in range(2):
            lives.wait(jobs)
            jobs.kill_server()
            jobs.restart_server(**WAITS)
            lives.go[life].set()
        found = [one.result() for one in trainers]
    check(found, lost=6 if saves == 2 else 11)


@pytest.mark.parametrize("kind", ["static", "remote"])
def test_servers_come_back_with_changes(kind, tmp_path, caplog):
    often = {"every_steps": 10**6, "delta_every_steps": 5, "full_every": 1000}
    lives = Lives(kind, again=until_back, **often)
    with (
        caplog.at_level(logging.WARNING),
        own_jobs(2, **seeing(tmp_path), **WAITS) as jobs,
    ):
        trainers = [jobs.trainer(name, lives.body) for name in "ab"]
        lives.wait(jobs)
        jobs.kill_server()
        jobs.restart_server(**WAITS)
        lives.go[0].set()
        jobs.wait(lives.back)
        names = set(re.findall(r"of snapshot (\S+)\. Lost are", caplog.text))
        (name,) = names
        assert Directory(tmp_path).manifest(name).base is not None
        lives.looked.set()
        found = [one.result() for one in trainers]
    check(found, lost=1)


def test_servers_are_lost_again_while_values_are_loaded(tmp_path, monkeypatch):
    """The wait begins anew, and nothing is counted twice."""
    lives = Lives(again=until_back)
    found = lost_again_while_loading(lives, tmp_path, monkeypatch)
    check(found)
    assert {one[2]["count"] for one in found} == {1}


def met(jobs, key):
    """Whether trainers have come so far with the servers that are there now."""
    try:
        return store_at(jobs.port, remaining_s=lambda: 5.0).check([key])
    except cpudist.Error:  # nobody is there yet
        return False


@pytest.mark.parametrize("first_back", [0, 1])
def test_trainer_0_ends_with_the_servers(first_back, tmp_path):
    """The other waits until it is started again, and loads; whoever comes first."""
    lives = Lives(again=until_back)
    ended = threading.Event()

    def first(context):
        if context.trainer_rank > 0:
            return lives.body(context)
        model, opt = wrapped("static")
        opt.resume()
        for _ in range(5):
            step(opt, model, 0)
        lives.save(opt, model, 0, 0)
        lives.arrived.release()
        assert ended.wait(PATIENCE_S)
        return None

    def second(context):
        assert context.trainer_rank == 0
        model, opt = wrapped("static")
        started = opt.resume()
        assert (started.name, started.step) == ("kept0", 5)
        for _ in range(4):
            step(opt, model, 0)
        cpudist.barrier()
        found = counted(opt, model)
        cpudist.barrier()
        return found

    with own_jobs(2, **seeing(tmp_path), **WAITS) as jobs:
        lives_of = {}
        for name in "ab":
            job = jobs.trainer(name, first)
            assert job.ready.wait(PATIENCE_S)
            lives_of[job.context.trainer_rank] = job
        lives.wait(jobs)
        jobs.kill_server()
        lives_of[0].end()
        ended.set()
        lives_of[0].wait()
        jobs.restart_server(**WAITS)
        if first_back == 0:
            again = jobs.trainer(lives_of[0].name, second)
            until(lambda: met(jobs, "start"), PATIENCE_S)
            lives.go[0].set()
        else:
            lives.go[0].set()
            until(lambda: met(jobs, "started"), PATIENCE_S)
            again = jobs.trainer(lives_of[0].name, second)
        rank, made, recovered, values = lives_of[1].result()
        assert again.result() == values
    assert rank == 1
    for some in values:
        assert some[:2] == [9, made - recovered["lost_updates"]]


class Full(Files):
    """A disk on which there is no room until somebody makes some."""

    def __init__(self, room):
        self.room = room

    def create(self, path):
        if not self.room.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


@pytest.mark.parametrize("strategy", ["async", "geo"])
def test_a_disk_that_is_full_is_waited_for(strategy, tmp_path, caplog):
    """Not a name more until trainer 0 has said so; the other waits for its word."""
    room = threading.Event()

    def again(opt, model, rank):
        opt.snapshots.directory.files = Full(room)
        until_back(opt, model, rank)

    def warnings():
        told = [one.getMessage() for one in caplog.records]
        return [one for one in told if "cannot come back to servers" in one]

    lives = Lives(again=again, strategy=strategy)
    with (
        caplog.at_level(logging.WARNING),
        own_jobs(2, **seeing(tmp_path), **WAITS) as jobs,
    ):
        trainers = without_servers(jobs, lives)
        until(lambda: jobs.check() or warnings(), PATIENCE_S)
        room.set()
        found = [one.result() for one in trainers]
    assert len(found) == 2
    assert all(one[2]["count"] == 1 for one in found)
    assert len(warnings()) == 1
    assert f"cannot write to {tmp_path}: No space left on device" in warnings()[0]


# -- where it cannot ---------------------------------------------------------------


def forever(opt, model, rank):
    while True:
        step(opt, model, rank)


def flushing(opt, model, rank):
    while True:
        opt.flush("dense")


TWICE = (forever, forever)  # and again


def refused(
    error, match, jobs, strategy="async", resumes=True, kind="static", calls=TWICE
):
    """Both trainers get an error of their own when the server is lost, in all calls."""
    lost, arrived = threading.Event(), threading.Barrier(3)

    def body(context):
        model, opt = wrapped(kind, strategy)
        if resumes:
            opt.resume()
        step(opt, model, context.trainer_rank)
        opt.flush("none")
        arrived.wait(PATIENCE_S)
        assert lost.wait(PATIENCE_S)
        for call in calls:
            with pytest.raises(error, match=match):
                call(opt, model, context.trainer_rank)
        context.abort("it has failed")

    trainers = [jobs.trainer(name, body) for name in "ab"]
    arrived.wait(PATIENCE_S)
    jobs.kill_server()
    lost.set()
    return trainers


def ended(jobs, trainers):
    for one in trainers:
        one.wait()
        error = one.error
        assert error is None or "shutdown() was called" in str(error), error


# Of a model without tables no forward asks servers.
@pytest.mark.parametrize(
    ("kind", "meets"),
    [("static", forever), ("dense", forever), ("dense", flushing)],
)
def test_without_a_snapshot_it_is_an_error(kind, meets, tmp_path):
    """It stays one: nobody trains on with servers that have no values."""
    later = (
        step,
        lambda opt, model, rank: opt.flush("dense"),
        lambda opt, model, rank: opt.table_stats(),
        lambda opt, model, rank: opt.state_dict(),
        lambda opt, model, rank: opt.leave(),
        at_a_barrier,
        step,
    )
    with own_jobs(2, **seeing(tmp_path), **WAITS) as jobs:
        match = "no snapshot in"
        how = {"kind": kind, "calls": (meets, *later)}
        trainers = refused(cpudist.SnapshotError, match, jobs, **how)
        jobs.restart_server(**WAITS)
        ended(jobs, trainers)
    assert Directory(tmp_path).names() == []


def test_servers_that_do_not_come_back_are_an_error(tmp_path):
    waits = {"CPUDIST_REJOIN_S": "1"}
    with own_jobs(2, **seeing(tmp_path), **waits) as jobs:
        match = r"within 1 s \(CPUDIST_REJOIN_S\).*nobody answers at"
        ended(jobs, refused(cpudist.PeerLostError, match, jobs))


@pytest.mark.parametrize(
    ("strategy", "resumes", "why"),
    [
        ("sync", True, "brings all back to one moment"),
        (cpudist.Geo(outer={"lr": 1.0}), False, r"under Geo\(outer=\.\.\.\)"),
        ("async", False, r"opt\.resume\(\) was not called"),
    ],
)
def test_who_cannot_go_on_is_told_at_once(strategy, resumes, why, tmp_path):
    with own_jobs(2, **seeing(tmp_path), **WAITS) as jobs:
        match = f"CPUDIST_REJOIN_S does not help here: .*{why}"
        more = {"strategy": strategy, "resumes": resumes}
        ended(jobs, refused(cpudist.PeerLostError, match, jobs, **more))


def test_without_the_variable_a_lost_server_ends_the_trainers(tmp_path):
    with own_jobs(2, **seeing(tmp_path)) as jobs:
        match = r"^(?!.*CPUDIST_REJOIN_S).*server 0"
        ended(jobs, refused(cpudist.PeerLostError, match, jobs))
