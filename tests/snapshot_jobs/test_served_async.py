# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Async and HalfAsync: a snapshot has every gradient up to its moment, and once."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from patience import PATIENCE_S
from snapshot_cases import settle, until
from snapshot_parity import seeing
from sync_cases import run
from turns import SideBySide
from whole_gradients import ROWS, check_files, expected, model_of, push

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

STRATEGIES = {
    "async": lambda: cpudist.Async(sharding=cpudist.Sharding(min_block_size=2)),
    "half_async": lambda: cpudist.HalfAsync(),
    "groups": lambda: cpudist.HalfAsync(group=[[0, 1], [2]]),
}


def job(kind, trainers, servers, folder, steps, every, remote=False):
    """Each trainer's steps at the end, and rows and dense values that all have then."""
    together = SideBySide(trainers, apart=4)

    def body(context):
        rank = context.trainer_rank
        model = model_of(remote)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=STRATEGIES[kind]())
        started = opt.resume(folder, every_steps=every)
        for step in range(started.step, steps[rank]):
            push(opt, model, rank, step)
            if kind == "async" and step % 3 == rank:
                time.sleep(0.001)  # others overtake
            together.step_over(rank)
        together.ends(rank)
        cpudist.barrier()  # all pushes are applied, and rows here are old
        opt.flush()
        with torch.no_grad():
            rows = model.table(torch.arange(ROWS)).clone()
        dense = model.dense.detach().clone()
        settle(opt)
        return started, rows, dense, opt.stats()["snapshot"]

    return run(body, trainers, servers=servers, variables=seeing(folder))


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 0), (2, 0), (3, 2)])
def test_async_has_every_gradient_once(trainers, servers, remote, tmp_path):
    first = [40 + 3 * rank for rank in range(trainers)]
    results = job("async", trainers, servers, tmp_path, first, 5, remote)
    assert all(one[3]["failed"] == 0 for one in results)
    assert check_files(tmp_path, 1.0) > 0
    last = [60 + 5 * rank for rank in range(trainers)]
    table, dense = expected(last)
    for started, rows, values, _ in job(
        "async", trainers, servers, tmp_path, last, None, remote
    ):
        assert started.step > 0
        assert torch.equal(rows, table)
        assert torch.equal(values, dense)


def test_half_async_of_one_group_each(tmp_path):
    """Every trainer is a group: its rounds are its own gradients."""
    results = job("half_async", 1, 2, tmp_path, [30], 4)
    assert results[0][3]["failed"] == 0
    assert check_files(tmp_path, 1.0) > 0
    table, dense = expected([45])
    [(started, rows, values, _)] = job("half_async", 1, 2, tmp_path, [45], None)
    assert started.step > 0
    assert torch.equal(rows, table)
    assert torch.equal(values, dense)


def test_half_async_of_groups(tmp_path):
    """Whose group waits for trainer 0 asks for marks, and marks a step later."""
    shares = (0.5, 0.5, 1.0)
    results = job("groups", 3, 2, tmp_path, [40, 40, 46], 4)
    assert all(one[3]["failed"] == 0 for one in results)
    assert check_files(tmp_path, 1.0, shares) > 0
    last = [60, 60, 70]
    table, dense = expected(last, shares)
    for started, rows, values, _ in job("groups", 3, 2, tmp_path, last, None):
        assert started.step > 0
        assert torch.equal(rows, table)
        assert torch.equal(values, dense)


def test_trainer_0_saves_while_the_others_go_on(tmp_path):
    over = threading.Event()

    def body(context):
        rank = context.trainer_rank
        model = model_of(remote=False)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy="async")
        opt.resume(tmp_path)
        step = 0
        while rank > 0 and not over.is_set():
            push(opt, model, rank, step)
            step += 1
        if rank == 0:
            push(opt, model, rank, 0)
            assert opt.save_snapshot("now") == "now"
            over.set()
        else:
            with pytest.raises(cpudist.InvalidArgumentError, match="trainer 0"):
                opt.save_snapshot()
        until(lambda: not opt.snapshots.busy)

    run(body, 2)
    assert check_files(tmp_path, 1.0) == 1
    steps = [one.steps for one in Snapshot(tmp_path / "now").manifest.trainers]
    assert steps[0] == 1
    assert len(steps) == 2


def test_a_trainer_that_does_not_step_keeps_none_from_training(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_cpudist.resuming.marking.WAIT_MS", 200)
    over = threading.Event()

    def body(context):
        model = model_of(remote=False)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy="async")
        opt.resume(tmp_path)
        push(opt, model, context.trainer_rank, 0)
        if context.trainer_rank == 1:
            assert over.wait(PATIENCE_S)  # an evaluation, say
            push(opt, model, 1, 1)
            return
        with pytest.raises(cpudist.SnapshotError, match="1"):
            opt.save_snapshot("none")
        push(opt, model, 0, 1)
        opt.flush()
        over.set()
        found = opt.stats()["snapshot"]
        assert (found["saved"], found["skipped"]) == (0, 1)

    run(body, 2)
    assert Directory(tmp_path).names() == []
