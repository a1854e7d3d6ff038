# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``global_step()`` is the cluster's count of steps, each counted once."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from async_cases import Counting, asynchronous, backward, seeds_of, wrapped
from geo_cases import geo
from sync_cases import run

import torch_cpudist as cpudist
from torch_cpudist import _core

STEPS = 12
MERGING = {"send_queue_size": 8, "max_merge": 8, "pull_every": 3}


def train(context, strategy, extra=0):
    """Every trainer's counts after each step, and after all have left."""
    model = Counting()
    opt = wrapped(model, strategy)
    known = [cpudist.global_step()]
    context.barrier()
    rank = context.trainer_rank
    for seed in seeds_of(rank, STEPS + extra * rank):
        opt.zero_grad()
        backward(model, seed)
        opt.step()
        known.append(cpudist.global_step())
    opt.leave()
    context.barrier()
    opt.flush()
    return known, cpudist.global_step(), opt.stats()["staleness"]["merged"]


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [
        (asynchronous(MERGING), 0),
        (asynchronous({"send_queue_size": 1}, max_staleness=2), 2),
        (geo(4), 2),
        (geo(4, outer={"lr": 1.0}), 1),
    ],
    ids=["merging", "bounded", "geo", "outer"],
)
def test_where_trainers_advance_apart_every_step_of_each_counts(strategy, servers):
    found = run(lambda context: train(context, strategy, extra=3), 3, servers)
    total = 3 * STEPS + 3 + 6
    for rank, (known, last, _) in enumerate(found):
        assert known[0] == 0
        # Its own steps count at once, those of others as it is told.
        assert all(after > before for before, after in pairwise(known))
        assert STEPS + 3 * rank <= known[-1] <= total
        assert last == total


def test_merged_pushes_count_every_step():
    """A slow network makes pushes wait, and merge."""

    def body(context):
        model = Counting()
        opt = wrapped(model, asynchronous(MERGING))
        for _ in range(40):  # a lookup would wait for its rows, and for pushes with it
            model.dense.grad = torch.ones_like(model.dense)
            opt.step()
        opt.flush()
        return cpudist.global_step(), opt.rounds, opt.stats()["staleness"]["merged"]

    plan = _core.FaultPlan(delay=1.0, delay_ms_max=20, seed=3)
    network = _core.InprocNetwork(plan)
    steps, updates, merged = run(body, 1, 1, network=network)[0]
    assert merged > 0
    assert steps == 40
    assert updates < 40


@pytest.mark.parametrize(
    ("strategy", "each"),
    [(cpudist.Sync(), 1), (cpudist.HalfAsync(group=[[0, 1], [2]]), 2)],
    ids=["sync", "half_async"],
)
def test_what_trainers_do_together_counts_once(strategy, each):
    for known, last, _ in run(lambda context: train(context, strategy), 3, 1):
        assert known == sorted(known)
        assert STEPS <= known[-1] == last <= each * STEPS


def test_rounds_without_a_trainer_are_counted_when_it_steps_again():
    """Those who end early know of the rounds up to their own last step."""
    found = run(lambda context: train(context, cpudist.Sync(), extra=3), 3, 1)
    for rank, (known, last, _) in enumerate(found):
        assert known == list(range(STEPS + 3 * rank + 1))
        assert last == known[-1]
