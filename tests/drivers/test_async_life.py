# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Async beside everything else that users do: state, schedulers, interrupts, ends."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from async_cases import (
    WIDTH,
    Counting,
    alone,
    asynchronous,
    backward,
    model_sum,
    wrapped,
)
from interrupts import interrupted, waiting_in_a_call
from patience import PATIENCE_S
from sync_cases import assert_same_bits, copy_of, run

import torch_cpudist as cpudist
from torch_cpudist import _core


def adagrad(model, **options):
    inner = torch.optim.Adagrad(model.parameters(), lr=0.5)
    return inner, cpudist.DistributedOptimizer(inner, model, **options)


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def test_state_goes_to_torch_and_back():
    """A resumed run equals the uninterrupted one; each step sees the one before."""

    def body(context):
        model = Counting()
        _, whole = adagrad(model, strategy=cpudist.Async(max_staleness=0))
        train(model, whole, range(10))
        whole.flush()
        expected = copy_of(model)

        model = Counting()
        _, first = adagrad(model, strategy=cpudist.Async(max_staleness=0))
        train(model, first, range(5))
        first.flush()
        saved, weights = first.state_dict(), copy_of(model)
        plain = torch.optim.Adagrad(Counting().parameters(), lr=0.5)
        plain.load_state_dict(saved)

        model = Counting()
        model.load_state_dict(weights)
        _, second = adagrad(model, strategy=cpudist.Async(max_staleness=0))
        second.load_state_dict(saved)
        train(model, second, range(5, 10))
        second.flush()
        assert_same_bits(copy_of(model), expected)

    alone(body, servers=2)


def test_what_is_queued_is_in_the_state_that_is_read():
    def body(context):
        model = Counting()
        # Two that wait would be one update.
        _, optimizer = adagrad(model, strategy=asynchronous({"max_merge": 1}))
        train(model, optimizer, range(5))
        rows = optimizer.state_dict()["state"][1]
        assert int(rows["step"]) == 5

    plan = _core.FaultPlan(delay=1.0, delay_ms_max=10, seed=1)
    alone(body, servers=2, network=_core.InprocNetwork(plan))


def test_a_learning_rate_is_that_of_the_step_it_was_set_for():
    """Steps of different rates wait together, and are never merged."""

    def body(context):
        model = Counting()
        queue = {"send_queue_size": 8, "max_merge": 8}
        optimizer = wrapped(model, asynchronous(queue))
        for step in range(16):
            optimizer.param_groups[0]["lr"] = float(step)
            model.dense.grad = torch.ones_like(model.dense)
            optimizer.step()
        optimizer.flush()
        assert optimizer.stats()["staleness"]["merged"] == 0
        return model.dense.detach()

    plan = _core.FaultPlan(delay=1.0, delay_ms_max=10, seed=1)
    found = alone(body, servers=2, network=_core.InprocNetwork(plan))
    assert (Counting().dense.detach() - found).eq(sum(range(16))).all()


@pytest.mark.parametrize("bound", [None, 3])
def test_a_trainer_leaves_and_comes_back(bound):
    def body(context):
        model = Counting()
        optimizer = wrapped(model, asynchronous({}, max_staleness=bound))
        train(model, optimizer, range(3))
        optimizer.leave()
        if bound is not None:
            optimizer.join()
        train(model, optimizer, range(3))
        context.barrier()
        optimizer.flush()
        return copy_of(model)

    for found in run(body, 3, 2):
        assert_same_bits(found, model_sum([0, 1, 2] * 6))


def test_the_bound_holds_over_leaving_and_barriers():
    """What was read before may be too old: joining comes before the next gradient."""
    left, done = threading.Event(), threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, asynchronous({}, max_staleness=1))
        train(model, optimizer, range(2))
        context.barrier()
        if context.trainer_rank == 0:
            optimizer.leave()
            backward(model, 7)
            left.set()
            assert done.wait(PATIENCE_S)
            with pytest.raises(cpudist.InvalidArgumentError, match=r"opt\.join"):
                optimizer.step()
            optimizer.join()
            train(model, optimizer, range(2, 4))
        else:
            assert left.wait(PATIENCE_S)
            train(model, optimizer, range(10))
            optimizer.leave()
            done.set()
        context.barrier()
        train(model, optimizer, [5])
        optimizer.flush()
        staleness = optimizer.stats()["staleness"]
        context.barrier()
        optimizer.flush()
        return copy_of(model), staleness["steps_max"]

    seeds = [0, 1] * 2 + [2, 3] + list(range(10)) + [5, 5]
    for found, oldest in run(body, 2, 2):
        assert_same_bits(found, model_sum(seeds))
        assert oldest <= 1


def test_steps_are_counted_without_a_dense_parameter():
    def body(context):
        model = torch.nn.Embedding(8, 2, sparse=True)
        optimizer = wrapped(model, "async")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
            optimizer.flush()
        optimizer.step()
        assert optimizer.rounds >= 3

    alone(body)


def test_wrapping_again_goes_on_from_the_servers_values():
    def body(context):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        train(model, cpudist.DistributedOptimizer(inner, model, "async"), range(4))
        optimizer = cpudist.DistributedOptimizer(inner, model, strategy="sync")
        optimizer.flush()
        return copy_of(model)

    for found in run(body, 2):
        assert_same_bits(found, model_sum([0, 1, 2, 3] * 2))


def test_an_interrupted_step_counts():
    """Ctrl-C while a step waits for room: the step is queued, the next ones go on."""

    def body(context):
        model = Counting()
        optimizer = wrapped(model, asynchronous({"send_queue_size": 1, "max_merge": 1}))
        begun, done = torch.zeros(WIDTH), torch.zeros(WIDTH)

        def train_for_ever():
            for step in itertools.cycle(range(WIDTH)):
                model.dense.grad = torch.zeros(WIDTH)
                model.dense.grad[step] = 1
                begun[step] += 1
                optimizer.step()
                done[step] += 1

        for _ in range(3):
            with pytest.raises(KeyboardInterrupt), interrupted(waiting_in_a_call()):
                train_for_ever()
        optimizer.flush()
        applied = Counting().dense.detach() - model.dense.detach()
        assert applied.ge(done).all()
        assert applied.le(begun).all()
        # Between two steps, or before one is queued, nothing waits long: at most one
        # or two of the interrupts came there.
        assert applied.sum() > done.sum()

    plan = _core.FaultPlan(delay=1.0, delay_ms_max=100, seed=1)
    network = _core.InprocNetwork(plan)
    context = cpudist.init(
        rank=0,
        world_size=1,
        store=torch.distributed.HashStore(),
        network=network,
        variables={"CPUDIST_THREADS": "1"},
    )
    body(context)
    cpudist.shutdown()


def test_a_wrong_number_of_samples_is_refused():
    def body(context):
        model = Counting()
        optimizer = wrapped(model, "async")
        backward(model, 0)
        for wrong in (-1, 0.5, 0.0, ""):
            with pytest.raises(cpudist.InvalidArgumentError, match="samples must be"):
                optimizer.step(samples=wrong)
        optimizer.step(samples=6)
        optimizer.flush()
        assert_same_bits(copy_of(model), model_sum([0]))

    alone(body)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: cpudist.Async(max_staleness=-1), r"max_staleness=-1\): must be at le"),
        (lambda: cpudist.Async(max_staleness=1.5), "expected int, found float"),
        (
            lambda: cpudist.Async(max_staleness=1, communicator={"pull_every": 2}),
            "older than the bound",
        ),
        (lambda: cpudist.Async(communicator={"queue": 1}), "no field 'queue'"),
        (lambda: cpudist.Communicator(send_queue_size=0), "must be at least 1"),
        (lambda: cpudist.Communicator(merge_rule="avg"), "Valid: auto, mean, sum"),
        (lambda: cpudist.strategy("async", max_stalenes=1), "mean max_staleness"),
    ],
)
def test_wrong_settings_name_the_nearest_right_ones(make, says):
    with pytest.raises(cpudist.ConfigurationError, match=says):
        make()


def test_settings_come_from_the_environment():
    variables = {
        "CPUDIST_STRATEGY": "async",
        "CPUDIST_ASYNC_MAX_STALENESS": "7",
        "CPUDIST_COMMUNICATOR_SEND_QUEUE_SIZE": "5",
        "CPUDIST_COMMUNICATOR_MERGE_RULE": "mean",
    }

    def body(context):
        return wrapped(Counting(), None).strategy

    found = alone(body, variables=variables)
    assert found.max_staleness == 7
    assert found.communicator.send_queue_size == 5
    assert found.communicator.merge_rule == "mean"
    none = alone(body, variables=variables | {"CPUDIST_ASYNC_MAX_STALENESS": "none"})
    assert none.max_staleness is None
