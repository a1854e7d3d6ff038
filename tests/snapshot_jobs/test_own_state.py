# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is a trainer's own: data, read-ahead, replicas, schedules, generators."""

from __future__ import annotations

import collections
import random
import threading
import time

import numpy as np
import pytest
import torch
from data_cases import SLOTS, records, write
from patience import PATIENCE_S
from snapshot_cases import Drawing, digest, settle
from snapshot_parity import seeing
from sync_cases import run
from torch import nn
from torch.optim import lr_scheduler

import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset, QueueDataset
from torch_cpudist.resuming.own_state import copied
from torch_cpudist.resuming.schedules import Schedules
from torch_cpudist.snapshot.reading import Snapshot


def wrapped(lr=0.05):
    model = Drawing()
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return (
        model,
        inner,
        cpudist.DistributedOptimizer(inner, model, strategy="allreduce"),
    )


def stepped(opt, model, x):
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()
    settle(opt)


def seen_of(kind, files, prefetch, steps, folder):
    """Numbers of the records of each step, from where the newest snapshot is."""

    def body(_):
        model, _, opt = wrapped()
        options = {"batch_size": 7, "threads": 2, "shuffle": True, "seed": 4}
        dataset = kind(files, SLOTS, **options)
        if kind is InMemoryDataset:
            dataset.load()
            dataset.local_shuffle(seed=9)
        started = None
        if folder is not None:
            started = opt.resume(folder, every_steps=5, state={"data": dataset})
        taken = started.step if started else 0
        seen = []
        for _ in range(dataset.epoch, 3):
            source = dataset
            if prefetch:
                source = cpudist.data.prefetch(dataset, opt, lambda _: {}, depth=3)
            for batch in source:
                seen.append(batch["number"].ids.tolist())
                stepped(opt, model, torch.full((4, 4), float(len(seen[-1]))))
                taken += 1
                if taken == steps:
                    opt.close()
                    return seen, started
        return seen, started

    return run(body, 1)[0]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("kind", [QueueDataset, InMemoryDataset])
def test_data_go_on_at_the_record(kind, prefetch, tmp_path):
    files = write(tmp_path, [records(40, seed) for seed in (1, 2)])
    whole, _ = seen_of(kind, files, prefetch, 36, None)
    first = [number for batch in whole[:12] for number in batch]
    assert sorted(first) == sorted(2 * list(range(40)))
    # In the first epoch, at the beginning of the second, and within that.
    for stop in (8, 14, 29):
        folder = tmp_path / f"{stop}"
        first, _ = seen_of(kind, files, prefetch, stop, folder)
        rest, started = seen_of(kind, files, prefetch, 36, folder)
        at = stop // 5 * 5
        assert started.step == at
        assert first == whole[:stop]
        assert rest == whole[at:]


def test_read_ahead_of_what_cannot_give_it_back_is_told(tmp_path):
    class Stateful(list):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    def body(_):
        model, _, opt = wrapped()
        source = Stateful([torch.ones(4, 4)] * 9)
        opt.resume(tmp_path, state={"data": source})
        for number, x in enumerate(cpudist.data.prefetch(source, opt, lambda _: {})):
            stepped(opt, model, x)
            if number == 3:
                with pytest.raises(cpudist.SnapshotError, match="unused="):
                    opt.save_snapshot()
        opt.save_snapshot("end")

    run(body, 1)


def test_generators_of_the_process_and_of_the_script_go_on(tmp_path):
    def drawn(generator):
        return [
            torch.rand(1).item(),
            random.random(),
            float(np.random.rand()),
            float(np.random.normal()),
            torch.rand(1, generator=generator).item(),
        ]

    def first(_):
        _, _, opt = wrapped()
        generator = torch.Generator().manual_seed(8)
        opt.resume(tmp_path, state={"own": generator})
        drawn(generator)
        opt.save_snapshot()
        return drawn(generator)

    def second(_):
        _, _, opt = wrapped()
        generator = torch.Generator()
        drawn(generator)
        opt.resume(tmp_path, state={"own": generator})
        return drawn(generator)

    assert run(first, 1) == run(second, 1)


def test_replicas_draw_on_whether_they_are_made_before_or_after(tmp_path):
    def body(steps, folder, late):
        def train(_):
            model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.3)
            inner = torch.optim.SGD(model.parameters(), lr=0.001)
            opt = cpudist.DistributedOptimizer(inner, model, strategy="allreduce")

            def loss(net, x):
                return net(x).square().mean()

            def executor():
                return cpudist.ReplicaExecutor(model, loss, opt, 2, seed=6)

            made = None if late else executor()
            started = opt.resume(folder) if folder else None
            made = made or executor()
            with made:
                for step in range(started.step if started else 0, steps):
                    made.run(torch.full((6, 4), step + 1.0))
            if folder:
                opt.save_snapshot()
            return digest(model)

        return run(train, 1)[0]

    whole = body(9, None, False)
    for late in (False, True):
        folder = tmp_path / str(late)
        body(4, folder, late)
        assert body(9, folder, late) == whole


def rates(make, per_epoch, steps, folder, every):
    """Learning rates of each step, of epochs of four."""

    def body(_):
        model, inner, opt = wrapped(lr=1.0)
        schedule = make(inner)
        started = opt.resume(folder, every_steps=every, state={"schedule": schedule})
        found = []
        for step in range(started.step, steps):
            if (
                per_epoch
                and step % 4 == 0
                and step
                and not (step == started.step and every == 3)
            ):
                schedule.step()
            found.append(inner.param_groups[0]["lr"])
            stepped(opt, model, torch.ones(4, 4))
            if not per_epoch:
                schedule.step()
        opt.close()
        return found, started.step

    return run(body, 1)[0]


def halving(inner):
    return lr_scheduler.ExponentialLR(inner, 0.5)


def chained(inner):
    parts = [lr_scheduler.ConstantLR(inner, 0.5, 2), halving(inner)]
    return lr_scheduler.SequentialLR(inner, parts, [3])


@pytest.mark.parametrize("make", [halving, chained])
@pytest.mark.parametrize("every", [1, 3])
def test_a_schedule_of_steps_is_saved_as_it_is_after_the_step(make, every, tmp_path):
    whole, _ = rates(make, False, 12, tmp_path / "whole", None)
    rates(make, False, 8, tmp_path / "some", every)
    rest, at = rates(make, False, 12, tmp_path / "some", every)
    assert at > 0
    assert rest == whole[at:]


def test_a_schedule_of_epochs_is_saved_as_it_is_within_the_epoch(tmp_path):
    """At the end of an epoch's data the script itself calls it again."""
    whole, _ = rates(halving, True, 12, tmp_path / "whole", None)
    for every in (4, 5, 6):
        folder = tmp_path / str(every)
        rates(halving, True, 11, folder, every)
        rest, at = rates(halving, True, 12, folder, every)
        assert at > 0
        assert rest == whole[at:]


def test_which_schedules_go_on_with_every_step():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    often, seldom = halving(inner), halving(inner)
    watched = Schedules({"often": often, "seldom": seldom})
    inner.step()
    for step in range(6):
        watched.left()
        often.step()
        if step == 4:
            seldom.step()
        assert watched.every_step() == ["often"]
        watched.entered()


class OwnStep(lr_scheduler.ExponentialLR):
    """Does something after torch's part of its step."""

    def step(self, epoch=None):
        super().step(epoch)
        self.own = self.last_epoch


@pytest.mark.parametrize(
    ("kind", "times", "known"),
    [
        (halving, 1, True),
        (chained, 1, True),
        (lambda inner: OwnStep(inner, 0.5), 1, False),
        (halving, 2, False),  # the second may be under way
    ],
)
def test_when_another_thread_knows_that_a_schedule_went_on(kind, times, known):
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    often, seldom = kind(inner), halving(inner)
    watched = Schedules({"often": often, "seldom": seldom})
    inner.step()
    for step in range(6):
        watched.left()
        assert not watched.seen()
        for _ in range(times):
            often.step()
        assert watched.seen() == (known and step > 0)
        watched.entered()


def test_manual_rates_come_back_with_the_groups(tmp_path):
    def body(rate):
        def train(_):
            _, inner, opt = wrapped()
            opt.resume(tmp_path)
            if rate:
                inner.param_groups[0]["lr"] = rate
                inner.param_groups[0]["note"] = ("a", 1)
                opt.save_snapshot("here")
            return inner.param_groups[0]["lr"], inner.param_groups[0].get("note")

        return run(train, 1)[0]

    body(0.25)
    assert body(None) == (0.25, ("a", 1))


def test_seconds_are_agreed_upon_by_trainers_that_step_together(tmp_path):
    saved = threading.Event()

    def body(context):
        model = Drawing()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        opt = cpudist.DistributedOptimizer(inner, model)
        opt.resume(tmp_path, every_s=0.2)
        until = time.monotonic() + PATIENCE_S
        while not saved.is_set() and time.monotonic() < until:
            opt.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            opt.step()
            if context.trainer_rank == 0 and opt.stats()["snapshot"]["saved"]:
                saved.set()

    run(body, 2, variables=seeing(tmp_path))
    assert saved.is_set()


def test_arrays_are_those_of_their_moment():
    mean = np.zeros(3)
    tree = copied({"mean": mean, "seen": collections.OrderedDict(a=mean)})
    mean += 1.0
    assert tree["mean"].tolist() == [0.0, 0.0, 0.0]
    assert type(tree["seen"]) is collections.OrderedDict
    assert tree["seen"]["a"].tolist() == [0.0, 0.0, 0.0]


def test_rates_of_another_optimizer_stay_with_it(tmp_path, caplog):
    def body(rule, rate):
        def train(_):
            model = Drawing()
            inner = rule(model.parameters(), lr=rate)
            opt = cpudist.DistributedOptimizer(inner, model)
            if opt.resume(tmp_path).name is None:
                opt.save_snapshot("here")
            return inner.param_groups[0]["lr"]

        return run(train, 1)

    assert body(torch.optim.SGD, 0.05) == [0.05]
    [group] = Snapshot(tmp_path / "here").manifest.param_groups
    assert (group["lr"], group["nesterov"]) == (0.05, False)
    assert "params" not in group
    assert body(torch.optim.Adam, 0.0125) == [0.0125]
    assert "another optimizer's" in caplog.text


def test_what_does_not_fit_is_reported(tmp_path, caplog):
    def body(second):
        def train(_):
            model, _, opt = wrapped()
            if second:
                model.register_buffer("new", torch.ones(2))
            state = {"kept": torch.Generator()} | (
                {} if second else {"gone": torch.Generator()}
            )
            started = opt.resume(tmp_path, state=state)
            if not second:
                opt.save_snapshot()
            return started

        return run(train, 1)[0]

    body(False)
    started = body(True)
    assert "buffer 'new'" in " ".join(started.report)
    assert "state['gone'] is not used" in " ".join(started.report)
    assert "buffer 'new'" in caplog.text
