# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""When Geo's exchanges are over, and what is told of those that are late."""

from __future__ import annotations

import logging

import pytest
import torch
from geo_cases import (
    Moving,
    exchange,
    geo,
    gradients,
    model_sum,
    put_gradients,
    seeds_of,
    train,
    wrapped,
)
from sync_cases import assert_same_bits, copy_of, run
from torch import nn

from torch_cpudist import _core

STEPS = 30


class Wide(nn.Module):
    """A dense vector whose exchange is as many slices, of 4096 elements."""

    def __init__(self, slices=100):
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(slices << 12))
        self.vector.grad = torch.ones(slices << 12)


def ended(opt):
    return opt.stats()["exchange"]["exchanges"]


@pytest.mark.parametrize("push_every", [1, 2, 7])
@pytest.mark.parametrize("make", [Moving, Wide])
def test_an_exchange_is_over_when_the_next_is_due(push_every, make):
    """However short steps are, and however little of their time one takes."""

    def body(context):
        model = make()
        opt = wrapped(model, geo(push_every, exchange_budget=None))
        for step in range(1, STEPS + 1):
            if make is Moving:
                put_gradients(model, gradients(STEPS * context.trainer_rank + step))
            opt.step()
            assert ended(opt) >= step // push_every - 1, step
        return opt.stats()["exchange"]

    for found in run(body, 2, 1):
        assert found["late_steps"] == 0
        assert found["late"] == 0 or found["wait_s"] > 0


def test_a_step_waits_for_an_answer_that_is_late_and_counts_it():
    """Nothing is lost, either, and no message tells of what no setting should be."""
    network = _core.InprocNetwork(_core.FaultPlan(delay=1.0, delay_ms_max=20, seed=1))

    def body(context):
        model = Moving()
        opt = wrapped(model, geo(1, exchange_budget=None))
        for step, seed in enumerate(seeds_of(context.trainer_rank, 10), start=1):
            train(model, opt, [seed])
            assert ended(opt) >= step - 1
        found = opt.stats()["exchange"]
        opt.leave()
        context.barrier()
        opt.flush()
        return copy_of(model), found

    for model, found in run(body, 2, 1, network=network):
        assert_same_bits(model, model_sum(seeds_of(0, 10) + seeds_of(1, 10)))
        assert found["late"] > 0
        assert found["late_steps"] == 0
        assert found["wait_s"] > 0


def test_work_is_spread_over_a_tenth_of_the_interval():
    """No step does all of it, and the rest of the interval is for the servers."""

    def body(context):
        model = Wide()
        opt = wrapped(model, geo(10_000, exchange_budget=None))
        opt.step()
        pushes = context.trainer_client().stats()["requests"]
        opt.trained.exchange.begin(whole=False, step=(0.0, 0.0), steps=1, samples=0)
        calls = {"pack": 0, "apply": 0}
        for phase in calls:
            done, left = False, 100
            while not done and left > 80:
                done = exchange(opt, "keep_pace", left=left, interval=100)
                calls[phase] += 1
                left -= 1
                if phase == "pack":
                    # Requests are numbered when they are made, not when answered.
                    done = ended_packing(context, pushes, opt)
            assert done
        return calls

    def ended_packing(context, pushes, opt):
        opt.trained.opened.drain()
        return context.trainer_client().stats()["requests"] > pushes

    assert run(body, 2, 1) == [{"pack": 11, "apply": 11}] * 2


def late_with(budget, caplog):
    def body(context):
        model = Wide(1000)
        opt = wrapped(model, geo(3, exchange_budget=budget))
        for _ in range(STEPS):
            opt.step()
        return opt.stats()["exchange"]

    with caplog.at_level(logging.WARNING, logger="torch_cpudist"):
        found = run(body, 2, 1)
    told = [r.message for r in caplog.records if "exchange_budget=" in r.message]
    return found, told


def test_a_late_exchange_is_counted_and_told_once(caplog):
    """A slice or few of a thousand in each step: it is late by all steps to come."""
    found, told = late_with(0.001, caplog)
    for one in found:
        assert (one["exchanges"], one["late"], one["late_steps"]) == (0, 1, STEPS - 6)
    assert len(told) == 2  # of each trainer
    for text in told:
        assert "Geo(push_every=3, exchange_budget=0.001)" in text
        assert "3 steps after the next was due" in text
        assert "exchange_budget at None" in text
        assert "push_every to at least 6" in text


def test_without_a_budget_none_is_told_of(caplog):
    found, told = late_with(None, caplog)
    assert not told
    for one in found:
        assert one["exchanges"] >= STEPS // 3 - 1
        assert one["late_steps"] == 0


def test_replicas_batches_count_towards_the_end_too():
    def body(context):
        model = Moving()
        opt = wrapped(model, geo(8, exchange_budget=None))
        for step in range(1, STEPS + 1):
            put_gradients(model, gradients(STEPS * context.trainer_rank + step))
            with opt.driver.step_of_replicas(3):
                opt.step()
            # Three steps have more than eight batches.
            assert ended(opt) >= step // 3 - 1
        return True

    assert all(run(body, 2, 1))
