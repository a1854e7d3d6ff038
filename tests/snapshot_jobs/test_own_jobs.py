# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of servers and trainers in jobs of their own."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter

import pytest
import torch
from own_jobs import own_jobs
from patience import PATIENCE_S
from snapshot_cases import settle
from snapshot_parity import seeing
from whole_gradients import DENSE, DIM, ROWS, expected, gradients, model_of, push

import torch_cpudist as cpudist
from torch_cpudist.drivers.served_saving import ServedSaving
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

BACK = [(0, "async"), (1, "async"), (0, "geo"), (1, "geo")]


def wrapped(strategy="async"):
    model = model_of(remote=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def test_files_have_the_id_of_the_run(tmp_path):
    """By which they are told from what a run that was killed has left."""

    def body(context):
        model, opt = wrapped("sync")
        opt.resume()
        push(opt, model, context.trainer_rank, 0)
        name = opt.save_snapshot()
        settle(opt)
        return context.run_id, name

    with own_jobs(2, **seeing(tmp_path)) as jobs:
        trainers = [jobs.trainer(name, body) for name in "ab"]
        found = [trainer.result() for trainer in trainers]
        run_id, name = found[0]
    assert run_id > 0
    assert found[1] == (run_id, name)
    text = names.run_text(run_id)
    assert name.endswith(f"-{text[-8:]}")
    for rank in range(2):
        entry = json.loads((tmp_path / name / names.trainer_name(rank)).read_text())
        assert entry["run"] == text


def test_it_begins_anew_and_goes_back_when_the_script_says_so(tmp_path):
    def job(load):
        def body(context):
            model, opt = wrapped()
            started = opt.resume(load=load)
            before = model.dense.detach().clone()
            if load:
                push(opt, model, context.trainer_rank, 0)
                opt.save_snapshot("here")
            else:
                assert opt.load_snapshot("here").step == 1
            opt.flush()
            return started, before, model.dense.detach().clone()

        with own_jobs(1, **seeing(tmp_path)) as jobs:
            return jobs.trainer("a", body).result()

    _, _, saved = job(True)
    started, before, loaded = job(False)
    assert (started.step, started.name) == (0, None)
    assert not before.any()
    assert saved.any()
    assert torch.equal(loaded, saved)


class Life:
    """Two trainers under Async, one of which is killed and comes back.

    Trainer 0 saves while both step; then the victim makes three steps more, all of
    which are applied, and is killed. ``made`` has the steps that servers applied.
    """

    def __init__(self, jobs, victim, saves, strategy="async"):
        self.jobs, self.victim, self.saves = jobs, victim, saves
        self.strategy = strategy
        self.made = [Counter(), Counter()]
        self.saved, self.ready = threading.Event(), threading.Event()
        self.over = threading.Event()

    def step(self, opt, model, rank, step, times=1):
        for one in range(step, step + times):
            push(opt, model, rank, one)
            self.made[rank][one] += 1
        opt.flush("none")
        return step + times

    def first(self, context):
        rank = context.trainer_rank
        model, opt = wrapped(self.strategy)
        assert opt.resume().step == 0
        step = self.step(opt, model, rank, 0, 4)
        if self.saves and rank == 0:
            opt.save_snapshot("mid")
            self.saved.set()
        while self.saves and not self.saved.is_set():
            step = self.step(opt, model, rank, step)
        step = self.step(opt, model, rank, step, 3)
        if rank == self.victim:
            self.ready.set()
            assert self.over.wait(PATIENCE_S)  # it is killed meanwhile
            return None
        cpudist.barrier()  # waits for the other one, which is killed and comes back
        step = self.step(opt, model, rank, step, 3)
        cpudist.barrier()
        return self.values(opt, model)

    def second(self, context):
        rank = context.trainer_rank
        assert rank == self.victim
        model, opt = wrapped(self.strategy)
        started = opt.resume()
        self.step(opt, model, rank, started.step, 2)
        cpudist.barrier()
        cpudist.barrier()
        return started, *self.values(opt, model)

    @staticmethod
    def values(opt, model):
        opt.flush()
        with torch.no_grad():
            return model.table.weight.clone(), model.dense.clone()

    def run(self):
        """How the victim started again, and what both have at the end."""
        lives = [self.jobs.trainer(name, self.first) for name in "ab"]
        self.jobs.wait(self.ready)
        ranks = by_rank(lives)
        ranks[self.victim].end()
        again = self.jobs.trainer(ranks[self.victim].name, self.second)
        try:
            started, table, dense = again.result()
            others = ranks[1 - self.victim].result()
        finally:
            self.over.set()
        assert torch.equal(table, others[0])
        assert torch.equal(dense, others[1])
        return started, table, dense

    def expected(self):
        table, dense = torch.zeros(ROWS, DIM), torch.zeros(DENSE)
        for rank, made in enumerate(self.made):
            for step, times in made.items():
                ids, of_rows, of_dense = gradients(rank, step)
                table.index_add_(0, ids, -of_rows * times)
                dense -= of_dense * times
        return table, dense


def by_rank(lives):
    """Trainer ids go by who comes first."""
    for life in lives:
        assert life.ready.wait(PATIENCE_S)
    return {life.context.trainer_rank: life for life in lives}


@pytest.mark.parametrize(("victim", "strategy"), BACK)
def test_a_trainer_that_comes_back_changes_no_value(victim, strategy, tmp_path, caplog):
    """It goes on at its newest state that was saved; all that was pushed stays."""
    with own_jobs(2, **seeing(tmp_path)) as jobs:
        life = Life(jobs, victim, saves=True, strategy=strategy)
        with caplog.at_level(logging.WARNING):
            started, table, dense = life.run()
    manifest = Snapshot(tmp_path / "mid").manifest
    assert started.name == "mid"
    assert started.step == manifest.trainers[victim].steps > 0
    assert (started.taken, started.missing) == ({}, {})
    assert any(f"trainer {victim} is back" in line for line in started.report)
    assert f"trainer {victim} is back" in caplog.text
    if strategy == "geo":  # which takes means of movements
        return
    wanted = life.expected()
    assert torch.equal(table, wanted[0])
    assert torch.equal(dense, wanted[1])


def test_a_trainer_that_comes_back_where_nothing_was_saved(tmp_path):
    """Values stay; it begins at step 0 and is told so."""
    with own_jobs(2, **seeing(tmp_path)) as jobs:
        life = Life(jobs, 1, saves=False)
        started, table, dense = life.run()
    assert (started.step, started.name) == (0, None)
    [line] = started.report
    assert "no snapshot of this run" in line
    assert "step 0" in line
    wanted = life.expected()
    assert torch.equal(table, wanted[0])
    assert torch.equal(dense, wanted[1])


def test_snapshots_go_on_with_who_has_come_back(tmp_path):
    """Steps that are made again count on servers, and keep none from being saved."""
    ended, back = threading.Event(), threading.Event()

    def first(context):
        rank = context.trainer_rank
        model, opt = wrapped()
        opt.resume()
        for step in range(3):
            push(opt, model, rank, step)
        opt.flush("none")
        if rank == 1:
            ended.set()
            assert back.wait(PATIENCE_S)
            return None
        assert back.wait(PATIENCE_S)
        push(opt, model, 0, 3)
        whole = opt.save_snapshot("whole")
        assert left.wait(PATIENCE_S)
        name = opt.save_snapshot("with-who-has-left")
        over.set()
        return whole, name, opt.stats()["snapshot"]

    left, over = threading.Event(), threading.Event()

    def second(_):
        model, opt = wrapped()
        assert opt.resume().step == 0
        push(opt, model, 1, 0)
        opt.flush("none")
        back.set()
        step = 1
        while "whole" not in Directory(tmp_path).names():
            push(opt, model, 1, step)
            step += 1
        opt.leave()
        left.set()
        assert over.wait(PATIENCE_S)

    with own_jobs(2, **seeing(tmp_path)) as jobs:
        ranks = by_rank([jobs.trainer(name, first) for name in "ab"])
        jobs.wait(ended)
        ranks[1].end()
        again = jobs.trainer(ranks[1].name, second)
        whole, name, counts = ranks[0].result()
        again.result()
    assert (whole, name) == ("whole", "with-who-has-left")
    assert (counts["saved"], counts["skipped"], counts["failed"]) == (2, 0, 0)
    assert [Snapshot(tmp_path / one).verify() for one in (whole, name)] == [[], []]


def test_a_directory_that_servers_do_not_have_is_refused_at_once(tmp_path):
    """By who comes back, too; nobody else is asked."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    begun, back = threading.Barrier(3), threading.Event()

    def first(_):
        _, opt = wrapped()
        opt.resume()
        begun.wait(PATIENCE_S)
        assert back.wait(PATIENCE_S)

    def second(_):
        _, opt = wrapped()
        try:
            with pytest.raises(cpudist.ConfigMismatchError, match="server 0") as raised:
                opt.resume(elsewhere)
            assert str(elsewhere) in str(raised.value)
            assert list(elsewhere.iterdir()) == []
        finally:
            back.set()

    with own_jobs(2, **seeing(here)) as jobs:
        lives = [jobs.trainer(name, first) for name in "ab"]
        begun.wait(PATIENCE_S)
        lives[1].end()
        jobs.trainer("b", second).result()
        lives[0].result()


def test_trainer_0_is_killed_while_it_loads(tmp_path, monkeypatch):
    """Nobody trains before it is back and has loaded all; then all go on from there."""

    def saved(context):
        rank = context.trainer_rank
        model, opt = wrapped()
        opt.resume()
        for step in range(5):
            push(opt, model, rank, step)
        if rank == 0:
            opt.save_snapshot("whole")
        while "whole" not in Directory(tmp_path).names():
            step += 1
            push(opt, model, rank, step)

    with own_jobs(2, **seeing(tmp_path)) as jobs:
        for one in [jobs.trainer(name, saved) for name in "ab"]:
            one.result()
    counts = [one.steps for one in Snapshot(tmp_path / "whole").manifest.trainers]
    known, loading, killed = ServedSaving.load, threading.Event(), threading.Event()

    def load(self, *arguments):
        known(self, *arguments)
        if not killed.is_set():
            loading.set()
            assert killed.wait(PATIENCE_S)
            raise SystemExit  # no error that could be told

    monkeypatch.setattr(ServedSaving, "load", load)

    def resumed(context):
        model, opt = wrapped()
        started = opt.resume()
        push(opt, model, context.trainer_rank, started.step)
        cpudist.barrier()
        return started.step, *Life.values(opt, model)

    with own_jobs(2, **seeing(tmp_path)) as jobs:
        ranks = by_rank([jobs.trainer(name, resumed) for name in "ab"])
        jobs.wait(loading)
        ranks[0].end()
        killed.set()
        ranks[0].wait()
        found = [jobs.trainer(ranks[0].name, resumed).result(), ranks[1].result()]
    assert [one[0] for one in found] == counts
    table, dense = expected([count + 1 for count in counts])
    for _, rows, values in found:
        assert torch.equal(rows, table)
        assert torch.equal(values, dense)
