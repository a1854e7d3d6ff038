# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""HalfAsync in groups: trainer 0's saves at once, while the other groups train on."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from own_jobs import own_jobs
from patience import PATIENCE_S
from snapshot_cases import settle, until
from snapshot_parity import seeing
from sync_cases import run
from whole_gradients import check_files, expected, model_of, push, saved_values

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

SHARES = (0.5, 0.5, 1.0)


def wrapped(groups):
    model = model_of(remote=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = cpudist.HalfAsync(group=groups)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


@pytest.mark.parametrize("every", [None, 4], ids=["only", "beside_periodic"])
def test_a_group_saves_at_once(every, tmp_path):
    """Also where a snapshot of the step before was asked for: it gives way."""
    over = threading.Event()

    def body(context):
        rank = context.trainer_rank
        model, opt = wrapped([[0, 1], [2]])
        opt.resume(tmp_path, every_steps=every, keep=100)
        names, step = [], 0
        while rank == 2 and not over.is_set():
            push(opt, model, rank, step)
            step += 1
        while rank < 2 and step < 12:
            push(opt, model, rank, step)
            step += 1
            if step in (4, 8):
                names.append(opt.save_snapshot(f"after-{step}"))
            elif step == 10:
                names.append(opt.save_snapshot())
        if rank == 2:
            with pytest.raises(cpudist.InvalidArgumentError, match="group"):
                opt.save_snapshot()
        else:
            over.set()
        until(lambda: not opt.snapshots.busy)
        return names

    first, second, _ = run(body, 3, servers=2, variables=seeing(tmp_path))
    assert first == second
    assert first[:2] == ["after-4", "after-8"]
    assert set(first) <= set(Directory(tmp_path).names())
    check_files(tmp_path, 1.0, SHARES)
    for name, steps in zip(first, (4, 8, 10), strict=True):
        trainers = Snapshot(tmp_path / name).manifest.trainers
        assert [one.steps for one in trainers[:2]] == [steps, steps]


def test_what_trainer_0_cannot_do_is_told_to_its_group(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("of somebody else")
    folder = tmp_path / "snapshots"

    def body(context):
        model = model_of(remote=True)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = cpudist.HalfAsync(group=[[0, 1]])
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
        opt.resume(folder)
        push(opt, model, context.trainer_rank, 0)
        assert opt.save_snapshot("best") == "best"
        with pytest.raises(cpudist.SnapshotError, match="ever overwritten"):
            opt.save_snapshot("best")
        with pytest.raises(cpudist.SnapshotError, match="other files") as raised:
            cpudist.export(model, tmp_path / "out")
        push(opt, model, context.trainer_rank, 1)
        cpudist.export(model, tmp_path / "model")
        return str(raised.value)

    said = run(body, 2, variables=seeing(folder))
    assert said[1] == f"trainer 0: {said[0]}"
    assert check_files(folder, 1.0, (0.5, 0.5)) == 2
    table, _ = expected([2, 2], (0.5, 0.5))
    plain = model_of(remote=True)
    with cpudist.load_for_inference(plain, tmp_path / "model") as reader:
        found = reader.look_up("table.weight", torch.arange(len(table)))
    assert torch.equal(found, table)


def test_a_group_of_jobs_of_their_own_saves_at_once(tmp_path):
    """They leave each other words in the directory, none of which stay for long."""

    def body(context):
        model, opt = wrapped([[0, 1]])
        opt.resume()
        names = []
        for step in range(20):
            push(opt, model, context.trainer_rank, step)
            names.append(opt.save_snapshot(f"after-{step + 1}"))
        settle(opt)
        return names

    with own_jobs(2, **seeing(tmp_path)) as jobs:
        trainers = [jobs.trainer(name, body) for name in "ab"]
        first, second = (trainer.result() for trainer in trainers)
    assert first == second == [f"after-{step + 1}" for step in range(20)]
    table, dense = expected([20, 20], (0.5, 0.5))
    weight, values = saved_values(Snapshot(tmp_path / "after-20"))
    assert torch.equal(weight, table)
    assert torch.equal(values, dense)


def test_who_has_left_and_is_back_saves_again(tmp_path):
    """Trainer 0 saves alone meanwhile: the others do not take its words for theirs."""
    left, saved = threading.Event(), threading.Event()
    last = []  # a round that both will be there for

    def body(context):
        rank = context.trainer_rank
        model, opt = wrapped([[0, 1]])
        opt.resume(tmp_path)
        push(opt, model, rank, 0)
        names = [opt.save_snapshot("both")]
        if rank == 1:
            opt.leave()
            left.set()
            assert saved.wait(PATIENCE_S)
        else:
            assert left.wait(PATIENCE_S)
            push(opt, model, 0, 1)
            assert opt.save_snapshot("alone") == "alone"
            saved.set()
        step = 2
        while not last or opt.rounds < last[0]:
            push(opt, model, rank, step)
            step += 1
            if rank == 1 and not last:  # back: no round is over without it from now on
                last.append(opt.rounds + 5)
        names.append(opt.save_snapshot("again"))
        cpudist.export(model, tmp_path / "out")
        return names

    assert run(body, 2, variables=seeing(tmp_path)) == [["both", "again"]] * 2


@pytest.mark.parametrize("apart", [False, True], ids=["one_job", "own_jobs"])
def test_a_group_that_has_gone_back_comes_to_the_same_round_again(apart, tmp_path):
    """What trainer 0 said there before is of cuts that are over."""

    def body(context):
        rank = context.trainer_rank
        model, opt = wrapped([[0, 1]])
        opt.resume()
        names = []
        for step, name in enumerate(("early", "late", "last")):
            push(opt, model, rank, step)
            names.append(opt.save_snapshot(name))
        opt.load_snapshot("early")
        push(opt, model, rank, 1)
        names.append(opt.save_snapshot("late-again"))
        settle(opt)
        return names

    if apart:
        with own_jobs(2, **seeing(tmp_path)) as jobs:
            trainers = [jobs.trainer(name, body) for name in "ab"]
            found = [trainer.result() for trainer in trainers]
    else:
        found = run(body, 2, variables=seeing(tmp_path))
    assert found == [["early", "late", "last", "late-again"]] * 2
    table, _ = expected([2, 2], (0.5, 0.5))
    for name in ("late", "late-again"):
        assert torch.equal(saved_values(Snapshot(tmp_path / name))[0], table)


def test_a_save_beside_one_that_others_have_still_to_mark(tmp_path):
    """Under Async it waits for that one: servers would refuse two of one moment."""
    over = threading.Event()

    def body(context):
        rank = context.trainer_rank
        model = model_of(remote=False)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy="async")
        opt.resume(tmp_path, every_steps=4, keep=100)
        step = 0
        while rank > 0 and not over.is_set():
            push(opt, model, rank, step)
            step += 1
            time.sleep(0.01)  # marks come that much later
        names = []
        while rank == 0 and step < 12:
            push(opt, model, rank, step)
            step += 1
            if step % 4 == 0:
                names.append(opt.save_snapshot(f"after-{step}"))
        over.set()
        until(lambda: not opt.snapshots.busy)
        return names

    found = run(body, 2, variables=seeing(tmp_path))[0]
    assert found == ["after-4", "after-8", "after-12"]
    assert check_files(tmp_path, 1.0) >= 3
