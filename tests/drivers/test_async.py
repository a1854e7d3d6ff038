# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Async: every gradient is applied exactly once; ages are measured and bounded."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from async_cases import (
    Counting,
    all_seeds,
    alone,
    asynchronous,
    backward,
    model_sum,
    train_counts,
    wrapped,
)
from patience import PATIENCE_S
from sync_cases import (
    KEY,
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    largest_difference,
    loss_of,
    run,
    train_plain,
)

import torch_cpudist as cpudist
from torch_cpudist import _core

QUEUES = {
    "default": {},
    "short": {"send_queue_size": 1, "max_merge": 1},
    "merging": {"send_queue_size": 8, "max_merge": 8},
    "rare pulls": {"send_queue_size": 4, "max_merge": 3, "pull_every": 5},
}
LAYOUTS = [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (3, 2), (2, 3)]


@pytest.mark.parametrize(("trainers", "servers"), LAYOUTS)
@pytest.mark.parametrize("queue", QUEUES)
def test_all_gradients_are_applied_once(trainers, servers, queue):
    expected = model_sum(all_seeds(trainers, 30))
    for found, stats in train_counts(trainers, servers, QUEUES[queue]):
        assert_same_bits(found, expected)
        assert stats["staleness"]["pushes"] == 30


@pytest.mark.parametrize("queue", ["default", "merging"])
@pytest.mark.parametrize("seed", range(3))
def test_over_lost_and_repeated_frames(queue, seed):
    plan = _core.FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, cut=0.01, seed=seed)
    network = _core.InprocNetwork(plan)
    links = {"network": network, "variables": KEY if seed == 1 else None}
    results = train_counts(2, 2, QUEUES[queue], steps=15, **links)
    for found, _ in results:
        assert_same_bits(found, model_sum(all_seeds(2, 15)))
    counts = network.counts()
    assert min(counts.dropped, counts.duplicated, counts.reordered) > 0


def test_with_trainers_that_finish_early():
    expected = model_sum(all_seeds(3, 30, early=True))
    for found, _ in train_counts(3, 2, QUEUES["default"], early=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("rule", ["sum", "mean"])
def test_pushes_that_wait_for_a_slow_server_are_merged_by_the_rule(rule):
    """Gradients of every step are equal, so that the mean of several counts as one."""

    def body(context):
        model = Counting()
        queue = {"send_queue_size": 8, "max_merge": 8, "merge_rule": rule}
        optimizer = wrapped(model, asynchronous(queue))
        for _ in range(30):
            model.dense.grad = torch.ones_like(model.dense)
            optimizer.step()
        optimizer.flush()
        return model.dense.detach(), optimizer.stats()["staleness"]

    plan = _core.FaultPlan(delay=1.0, delay_ms_max=20, seed=3)
    found, staleness = alone(body, servers=2, network=_core.InprocNetwork(plan))
    assert staleness["merged"] > 0
    assert staleness["pushes"] == 30
    updates = 30 if rule == "sum" else 30 - staleness["merged"]
    assert (Counting().dense.detach() - found).eq(updates).all()


@pytest.mark.parametrize("name", RULES)
def test_one_trainer_that_waits_for_its_updates_equals_plain_torch(name):
    batches = Batches(1, steps=25)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES[name], model), model, strategy=cpudist.Async(max_staleness=0)
        )
        for step in range(len(batches)):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            optimizer.step()
        optimizer.flush()
        assert optimizer.stats()["staleness"]["steps_max"] == 0
        return copy_of(model)

    plain = train_plain(RULES[name], batches)
    assert largest_difference(alone(body, servers=2), plain) <= 1e-6


@pytest.mark.parametrize(
    "clip",
    [cpudist.ClipNorm(0.3), cpudist.ClipTensorNorm(0.2), cpudist.ClipValue(0.05)],
)
def test_each_push_is_clipped_as_torch_clips(clip):
    batches = Batches(1, steps=10)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model),
            model,
            strategy=cpudist.Async(max_staleness=0),
            clip=clip,
        )
        for step in range(len(batches)):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            optimizer.step()
        optimizer.flush()
        return copy_of(model)

    def plain():
        model = Model()
        dense = [p for n, p in model.named_parameters() if n != "bag.weight"]
        inner = torch.optim.SGD(model.parameters(), **SGD)
        for step in range(len(batches)):
            inner.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            model.bag.weight.grad = model.bag.weight.grad.coalesce()
            rows = model.bag.weight.grad.values()
            if isinstance(clip, cpudist.ClipNorm):
                cpudist.clip_grad_norm_(model.parameters(), clip.max_norm)
            elif isinstance(clip, cpudist.ClipTensorNorm):
                for parameter in model.parameters():
                    cpudist.clip_grad_norm_(parameter, clip.max_norm)
            else:
                torch.nn.utils.clip_grad_value_(dense, clip.value)
                rows.clamp_(-clip.value, clip.value)
            inner.step()
        return copy_of(model)

    probe = Model()
    SGD = {"lr": build(RULES["sgd"], probe)[0].param_groups[0]["lr"]}
    assert largest_difference(alone(body), plain()) <= 1e-6


def test_age_counts_the_updates_and_samples_since_the_values_were_read():
    """Trainer 1 computes a gradient, trainer 0 makes 5 steps of 7 samples, 1 pushes."""
    read, pushed = threading.Event(), threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, asynchronous({}))
        if context.trainer_rank == 1:
            backward(model, 1)
            read.set()
            assert pushed.wait(PATIENCE_S)
            optimizer.step(samples=3)
        else:
            assert read.wait(PATIENCE_S)
            for _ in range(5):
                optimizer.zero_grad()
                backward(model, 2)
                optimizer.step(samples=7)
                optimizer.flush()
            pushed.set()
        optimizer.flush()
        return optimizer.stats()["staleness"]

    first, second = run(body, 2, 1)
    assert (first["steps_max"], first["samples_max"]) == (0, 0)
    assert first["steps"] == {"0": 5}
    assert (second["steps_max"], second["samples_max"]) == (5, 35)
    assert second["steps"] == {"0": 0, "1": 0, "2-3": 0, "4-7": 1}


@pytest.mark.parametrize(("trainers", "bound"), [(2, 1), (3, 2), (3, 7)])
@pytest.mark.parametrize("servers", [1, 2])
def test_no_gradient_is_older_than_the_bound(trainers, servers, bound):
    """The last trainer is slow; the others would leave it far behind."""

    def body(context):
        model = Counting()
        optimizer = wrapped(model, asynchronous({}, max_staleness=bound))
        slow = context.trainer_rank == trainers - 1
        for step in range(6 if slow else 40):
            optimizer.zero_grad()
            backward(model, step)
            if slow:
                time.sleep(0.01)
            optimizer.step()
        optimizer.leave()
        context.barrier()
        optimizer.flush()
        return copy_of(model), optimizer.stats()["staleness"]

    seeds = [s for rank in range(trainers - 1) for s in range(40)] + list(range(6))
    for found, staleness in run(body, trainers, servers):
        assert_same_bits(found, model_sum(seeds))
        assert staleness["steps_max"] <= bound


def test_without_a_bound_a_slow_trainer_is_left_behind():
    """The counterpart of the test above: what it asserts does not hold by itself."""
    read, pushed = threading.Event(), threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, asynchronous({}))
        if context.trainer_rank == 1:
            backward(model, 0)
            read.set()
            assert pushed.wait(PATIENCE_S)
            optimizer.step()
        else:
            assert read.wait(PATIENCE_S)
            for step in range(20):
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
            optimizer.flush()
            pushed.set()
        optimizer.flush()
        return optimizer.stats()["staleness"]["steps_max"]

    assert run(body, 2)[1] >= 10  # two merged pushes are one update


def test_a_bound_below_the_number_of_trainers_is_refused():
    def body(context):
        with pytest.raises(cpudist.InvalidArgumentError, match="at least 2"):
            wrapped(Counting(), asynchronous({}, max_staleness=1))

    run(body, 3)


@pytest.mark.parametrize(
    ("strategies", "says"),
    [
        ((asynchronous({}, max_staleness=5), asynchronous({}, max_staleness=6)), "max"),
        (("sync", "async"), "update mode"),
    ],
)
def test_trainers_with_other_bounds_or_strategies_are_told(strategies, says):
    def body(context):
        wrapped(Counting(), strategies[context.trainer_rank])

    with pytest.raises(cpudist.ConfigMismatchError, match=says):
        run(body, 2)
