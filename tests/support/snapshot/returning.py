# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trainers whose servers are lost and come back, and how each of them meets that.

Of each trainer all gradients are equal, so that values say how many were applied.
"""

from __future__ import annotations

import threading

import torch
from counting import counted, step, wrapped
from own_jobs import own_jobs
from patience import PATIENCE_S
from snapshot_cases import until
from snapshot_parity import seeing

import torch_cpudist as cpudist
from torch_cpudist.drivers.served_saving import ServedSaving

WAITS = {"CPUDIST_REJOIN_S": str(int(PATIENCE_S))}


class Lives:
    """Two trainers that save, are told to go on without servers, and end together.

    Attributes:
        kind: of the model, see ``Counting``.
        arrived: trainers that have saved, and made more steps.
        go: by number, of those that wait for it then.
        saves: in each life of the servers but the last.
    """

    def __init__(
        self,
        kind="static",
        lives=2,
        saves=1,
        again=step,
        strategy="async",
        **often,
    ):
        self.kind, self.lives, self.saves, self.again = kind, lives, saves, again
        self.strategy = strategy
        self.often = often
        self.arrived = threading.Semaphore(0)
        self.both = threading.Barrier(2)
        self.back, self.looked = threading.Event(), threading.Event()
        self.go = [threading.Event() for _ in range(lives)]
        self.saved = [threading.Event() for _ in range(lives)]

    def body(self, context):
        rank = context.trainer_rank
        model, opt = wrapped(self.kind, self.strategy)
        before = opt.resume(**self.often).step
        for life in range(self.lives - 1):
            for _ in range(5):
                step(opt, model, rank)
            if life < self.saves:
                self.save(opt, model, rank, life)
            for _ in range(3):
                step(opt, model, rank)
            opt.flush("none")
            self.arrived.release()
            assert self.go[life].wait(PATIENCE_S)
            self.again(opt, model, rank)
            assert opt.stats()["recovered"]["count"] == life + 1
        self.back.set()
        assert not self.often or self.looked.wait(PATIENCE_S)
        for _ in range(4):
            step(opt, model, rank)
        made = before + opt.stats()["steps"]
        cpudist.barrier()
        found = counted(opt, model)
        cpudist.barrier()
        return rank, made, opt.stats()["recovered"], found

    def save(self, opt, model, rank, life):
        self.both.wait(PATIENCE_S)  # none is saved while one of them is not there
        if rank == 0:
            if self.often:
                while not opt.stats()["snapshot"]["deltas"]:
                    step(opt, model, rank)
            else:
                opt.save_snapshot(f"kept{life}")
            self.saved[life].set()
        while not self.saved[life].is_set():
            step(opt, model, rank)

    def wait(self, jobs, trainers=2):
        """Returns when all have made and flushed their steps."""
        for _ in range(trainers):
            until(lambda: self.there(jobs), PATIENCE_S)

    def there(self, jobs):
        jobs.check()
        return self.arrived.acquire(blocking=False)


def check(found, lost=2):
    """Values are all gradients but those that are reported lost."""
    assert sorted(one[0] for one in found) == [0, 1]
    for rank, made, recovered, values in found:
        assert recovered["lost_updates"] >= lost
        assert recovered["lost_s"] > 0
        for some in values:
            assert some[rank] == made - recovered["lost_updates"], (rank, found)
    assert found[0][3] == found[1][3]


def looked_up(opt, model, rank):
    """A forward meets the loss."""
    with torch.no_grad():
        model(rank)


def stepped(opt, model, rank):
    """A step meets it, or its forward where tables are pulled."""
    while not opt.stats()["recovered"]["count"]:
        step(opt, model, rank)


def flushed(opt, model, rank):
    while not opt.stats()["recovered"]["count"]:
        opt.flush("dense")


def at_a_barrier(opt, model, rank):
    cpudist.barrier()


def until_back(opt, model, rank):
    count = opt.stats()["recovered"]["count"]
    while opt.stats()["recovered"]["count"] == count:
        step(opt, model, rank)


def lost_again_while_loading(lives, folder, monkeypatch):
    """What both trainers return whose servers are lost a second time in their load."""
    known, loading = ServedSaving.load, threading.Event()
    killed = threading.Event()

    def load(self, *arguments):
        known(self, *arguments)
        if not killed.is_set():
            loading.set()
            assert killed.wait(PATIENCE_S)

    with own_jobs(2, **seeing(folder), **WAITS) as jobs:
        trainers = [jobs.trainer(name, lives.body) for name in "ab"]
        lives.wait(jobs)
        monkeypatch.setattr(ServedSaving, "load", load)
        jobs.kill_server()
        jobs.restart_server(**WAITS)
        lives.go[0].set()
        jobs.wait(loading)
        jobs.kill_server()
        killed.set()
        jobs.restart_server(**WAITS)
        return [one.result() for one in trainers]
