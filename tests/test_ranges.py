# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pulls, pushes, exchanges and waits in what torch's profiler shows of real steps."""

from __future__ import annotations

import sys

import torch
from sync_cases import run
from table_cases import embedding, ids, sgd
from torch import nn
from torch.profiler import ProfilerActivity

import torch_cpudist as cpudist
from torch_cpudist import _core, ranges

NAMES = (ranges.PULL, ranges.PUSH, ranges.EXCHANGE, ranges.WAIT)


def shown(body):
    """The ranges of this package while ``body`` runs, each as (begin, end)."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        body()
    found = {name: [] for name in NAMES}
    for event in profile.events():
        if event.name in found:
            found[event.name].append((event.time_range.start, event.time_range.end))
    return found


def inside(inner, outers):
    return any(begin <= inner[0] and inner[1] <= end for begin, end in outers)


def steps(strategy, count, trainers=1, servers=1):
    """What is shown of steps of trainer 0, whose servers are apart; and of a flush."""

    def body(context):
        model = nn.Sequential(embedding(), nn.Linear(3, 1))
        optimizer = cpudist.DistributedOptimizer(sgd(model), model, strategy)

        def train():
            for step in range(count):
                optimizer.zero_grad()
                model(ids(step, 1)).sum().backward()
                optimizer.step()
            optimizer.flush()

        if context.trainer_rank:
            train()
            return None
        return shown(train)

    return run(body, trainers, servers)[0]


def test_a_step_under_sync_pulls_pushes_and_waits_for_servers():
    found = steps(cpudist.Sync(), 3)
    assert len(found[ranges.PUSH]) == 3
    # A lookup per step, dense values and tables once in flush().
    assert len(found[ranges.PULL]) == 3 + 2
    assert found[ranges.EXCHANGE] == []
    # Every push waits for the round; a lookup of rows that are here for nobody.
    outer = found[ranges.PULL] + found[ranges.PUSH]
    assert len(found[ranges.WAIT]) >= 3
    assert all(inside(wait, outer) for wait in found[ranges.WAIT])
    for push in found[ranges.PUSH]:
        assert any(inside(wait, [push]) for wait in found[ranges.WAIT])


def test_under_async_a_push_does_not_wait_and_a_flush_does():
    found = steps(cpudist.Async(), 2)
    assert len(found[ranges.PUSH]) == 2
    assert found[ranges.PULL]
    assert any(not inside(wait, found[ranges.PULL]) for wait in found[ranges.WAIT])


def test_geo_and_allreduce_exchange():
    found = steps(cpudist.Geo(push_every=1), 2, trainers=2)
    assert len(found[ranges.EXCHANGE]) >= 2
    assert found[ranges.PUSH] == []

    cpudist.init()
    try:
        model = nn.Linear(2, 1)
        optimizer = cpudist.DistributedOptimizer(sgd(model), model, "allreduce")
        model(torch.ones(1, 2)).sum().backward()
        assert len(shown(optimizer.step)[ranges.EXCHANGE]) >= 1
    finally:
        cpudist.current().abort("seen")


def test_without_a_profiler_nothing_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(ranges, "Range", lambda name: made.append(name))
    monkeypatch.setattr(
        torch.profiler, "record_function", lambda name: made.append(name)
    )

    def body(context):
        model = nn.Sequential(embedding(), nn.Linear(3, 1))
        optimizer = cpudist.DistributedOptimizer(sgd(model), model)
        model(ids(0, 1)).sum().backward()
        optimizer.step()
        cpudist.barrier()
        optimizer.flush()

    run(body, 1)
    assert made == []
    assert ranges.of(ranges.PULL) is ranges.of(ranges.PUSH)


def test_the_listener_is_put_back_and_a_failing_one_ends_nothing(monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda seen: unraisable.append(seen))

    def told(begins):
        raise ValueError(f"begins: {begins}")

    def body(context):
        model = nn.Sequential(embedding(), nn.Linear(3, 1))
        optimizer = cpudist.DistributedOptimizer(sgd(model), model)
        model(ids(0, 1)).sum().backward()
        assert _core.listen_to_waits(told) is None
        optimizer.step()
        assert _core.listen_to_waits(None) is told
        assert _core.listen_to_waits(None) is None
        assert optimizer.rounds == 1

    run(body, 1, 1)
    said = [str(one.exc_value) for one in unraisable]
    assert said[:2] == ["begins: True", "begins: False"]
