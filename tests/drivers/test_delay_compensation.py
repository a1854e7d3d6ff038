# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""DC-ASGD: the algebra step by step, what is kept for how long, what it is good for.

Tests of the algebra note what every gradient was computed on and replay the updates in
plain torch, operation by operation.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE_S
from sync_cases import (
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    loss_of,
    run,
)
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core, strategies
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch import environment
from torch_cpudist.testing import Turns

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from cases import delay

ROWS, DIM, LOOKUPS, LR = 12, 3, 4, 0.125
CONSTANT = cpudist.DelayCompensation(factor=0.5)
ADAPTIVE = cpudist.DelayCompensation(
    factor=0.5, adaptive=True, momentum=0.75, epsilon=1e-7
)
Step = dict[str, tuple[Any, torch.Tensor, torch.Tensor]]


class Parts(nn.Module):
    """A table and dense parameters of both dtypes; gradients are random."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.narrow = nn.Parameter(torch.randn(20, generator=generator))
        self.wide = nn.Parameter(torch.randn(7, generator=generator).double())
        with torch.no_grad():
            self.table.weight.copy_(torch.randn(ROWS, DIM, generator=generator))

    def forward_and_backward(self, generator: torch.Generator) -> Step:
        """Returns place, gradient and the values read, by parameter."""
        ids = torch.randperm(ROWS, generator=generator)[:LOOKUPS]
        rows = self.table(ids)
        parts = {"table.weight": (ids, rows), "narrow": (slice(None), self.narrow)}
        parts["wide"] = (slice(None), self.wide)
        step, loss = {}, torch.zeros(())
        for name, (place, values) in parts.items():
            gradient = torch.randn(values.shape, generator=generator).to(values.dtype)
            loss = loss + (values * gradient).sum()
            step[name] = (place, gradient, values.detach().clone())
        loss.backward()
        return step


def wrapped(model: nn.Module, **options: Any) -> cpudist.DistributedOptimizer:
    strategy = cpudist.Async(sharding={"min_block_size": 4}, **options)
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    return cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def replay(
    steps: list[Step], compensation: cpudist.DelayCompensation | None
) -> tuple[dict[str, torch.Tensor], int]:
    """The algorithm on one copy of the values; and how often a value had moved on."""
    state = copy_of(Parts())
    means = {name: torch.zeros_like(value) for name, value in state.items()}
    moved_ones = 0
    for step in steps:
        for name, (place, gradient, read) in step.items():
            moved = state[name][place] - read
            moved_ones += int(moved.any())
            if compensation is not None:
                factor = torch.full_like(gradient, compensation.factor)
                if compensation.adaptive:
                    kept = compensation.momentum * means[name][place]
                    mean = kept + (1 - compensation.momentum) * (gradient * gradient)
                    means[name][place] = mean
                    # torch's square root may be off by the last bit.
                    root = np.sqrt((mean + compensation.epsilon).numpy())
                    factor = factor / torch.from_numpy(root)
                gradient = gradient + factor * gradient * gradient * moved
            state[name][place] += -LR * gradient
    return state, moved_ones


def train_in_turns(schedule: list[int], servers: int, **options: Any) -> Any:
    """Steps by schedule, each on what was read after the trainer's last one."""
    turns, steps = Turns([0, 1, 2, *schedule], deadline_s=PATIENCE_S), {}

    def body(context: cpudist.Context) -> dict[str, torch.Tensor]:
        model = Parts()
        optimizer = wrapped(model, **options)
        generator = torch.Generator().manual_seed(context.trainer_rank)
        ready: list[Step] = []
        context.barrier()

        def turn(position: int) -> None:
            if ready:
                steps[position] = ready.pop()
                optimizer.step()
                optimizer.flush(pull="dense")
                optimizer.zero_grad()
            ready.append(model.forward_and_backward(generator))

        turns.take(context.trainer_rank, turn)
        context.barrier()
        optimizer.flush()
        return copy_of(model)

    found = run(body, 3, servers)
    return found, [steps[position] for position in sorted(steps)]


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("compensation", [None, CONSTANT, ADAPTIVE])
def test_trainers_in_a_random_order_equal_the_algorithm(compensation, servers):
    chance = random.Random(5)
    schedule = [chance.randrange(3) for _ in range(40)]
    found, steps = train_in_turns(schedule, servers, delay_compensation=compensation)
    expected, moved_ones = replay(steps, compensation)
    assert moved_ones > 40
    for one in found:
        assert_same_bits(one, expected)


def test_a_factor_of_0_changes_no_bit():
    schedule = [step % 3 for step in range(24)]
    plain, _ = train_in_turns(schedule, 1)
    zero, _ = train_in_turns(schedule, 1, delay_compensation={"factor": 0})
    assert_same_bits(zero[0], plain[0])
    other, _ = train_in_turns(schedule, 1, delay_compensation=CONSTANT)
    assert not torch.equal(other[0]["narrow"], plain[0]["narrow"])


@pytest.mark.parametrize("compensation", [CONSTANT, ADAPTIVE])
@pytest.mark.parametrize("pull_every", [1, 3])
def test_what_waits_in_the_queue_is_compared_with_what_it_was_computed_on(
    compensation, pull_every
):
    """Rows of later steps are read, and older values used, while pushes wait."""
    steps = []

    def body(context: cpudist.Context) -> dict[str, torch.Tensor]:
        model = Parts()
        optimizer = wrapped(
            model,
            delay_compensation=compensation,
            communicator={"send_queue_size": 4, "pull_every": pull_every},
        )
        generator = torch.Generator().manual_seed(3)
        for _ in range(25):
            optimizer.zero_grad()
            steps.append(model.forward_and_backward(generator))
            optimizer.step()
        optimizer.flush()
        assert optimizer.stats()["staleness"]["merged"] == 0
        return copy_of(model)

    plan = _core.FaultPlan(delay=1.0, delay_ms_max=4, seed=3)
    (found,) = run(body, 1, 2, network=_core.InprocNetwork(plan))
    expected, moved_ones = replay(steps, compensation)
    assert moved_ones > 10
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["sgd_momentum", "adagrad", "adamw"])
@pytest.mark.parametrize("compensation", [CONSTANT, ADAPTIVE])
def test_without_delay_it_equals_sync(name, compensation):
    batches = Batches(1, steps=15)

    def train(strategy):
        def body(context):
            model = Model()
            optimizer = cpudist.DistributedOptimizer(
                build(RULES[name], model), model, strategy=strategy
            )
            for step in range(len(batches)):
                optimizer.zero_grad()
                loss_of(model, batches.part(step, 0)).backward()
                optimizer.step()
            optimizer.flush()
            return copy_of(model)

        return run(body, 1, 2)[0]

    late = cpudist.Async(max_staleness=0, delay_compensation=compensation)
    assert_same_bits(train(late), train(cpudist.Sync()))


def test_over_lost_and_repeated_frames_every_gradient_arrives():
    def body(context):
        model = Parts()
        optimizer = wrapped(model, delay_compensation=ADAPTIVE)
        generator = torch.Generator().manual_seed(context.trainer_rank)
        for _ in range(12):
            optimizer.zero_grad()
            model.forward_and_backward(generator)
            optimizer.step()
        context.barrier()
        optimizer.flush()
        return copy_of(model), optimizer.stats()["staleness"]["pushes"]

    plan = _core.FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, cut=0.01, seed=2)
    first, second = run(body, 2, 2, network=_core.InprocNetwork(plan))
    assert first[1] == second[1] == 12
    assert_same_bits(first[0], second[0])
    assert all(value.isfinite().all() for value in first[0].values())


def test_backups_are_counted_and_end_with_their_trainer():
    def body(context):
        model = Parts()
        optimizer = wrapped(model, delay_compensation=CONSTANT)

        def held() -> int:
            return context.server.stats()["backup_bytes"]

        generator = torch.Generator().manual_seed(0)
        sizes = []
        for _ in range(6):
            optimizer.zero_grad()
            model.forward_and_backward(generator)
            optimizer.step()
            optimizer.flush(pull="dense")
            sizes.append(held())
        assert 0 < max(sizes) < 1000  # what was read of 180 bytes, and no history
        model.table(torch.arange(ROWS))
        assert held() >= sizes[-1] + ROWS * DIM * 4
        optimizer.leave()
        assert held() == 0
        model.table(torch.arange(ROWS))  # to look at, not to learn from
        optimizer.flush()
        return held()

    assert run(body, 1) == [0]


def test_settings_that_make_no_sense_are_refused():
    compensation = cpudist.DelayCompensation
    for make, says in [
        (lambda: compensation(factor=-1), "at least 0"),
        (lambda: compensation(factor=float("inf")), "at most"),
        (lambda: compensation(adaptive=True, momentum=1), "at most 0.9999"),
        (lambda: compensation(adaptive=True, epsilon=0), "at least 1e-30"),
        (compensation(momentum=0.95).check_whole, "without adaptive: it belongs"),
        (compensation(factor=1, epsilon=1e-7).check_whole, "too, or leave epsilon"),
        (lambda: compensation(adaptive=1), "expected bool"),
        (lambda: cpudist.Async(delay_compensation=3), "expected DelayCompensation"),
        (
            lambda: cpudist.Async(delay_compensation={}, communicator={"max_merge": 2}),
            "Leave max_merge at None",
        ),
        (lambda: cpudist.Sync(delay_compensation={}), "unexpected keyword"),
    ]:
        with pytest.raises((ConfigurationError, TypeError), match=says):
            make()
    assert compensation().resolved() == (0.04, False, 0.95, 1e-7)
    assert compensation(adaptive=True).resolved() == (2.0, True, 0.95, 1e-7)


def test_any_variable_switches_it_on():
    def resolve(chosen: Any = "async", **variables: str) -> Any:
        made = environment.parse(variables)
        return strategies.resolve(chosen, made.strategy, made.values, made.server)

    assert resolve().delay_compensation is None
    assert resolve().max_merge == 2
    made = resolve(CPUDIST_DELAYCOMPENSATION_FACTOR="0.5")
    assert made.delay_compensation == CONSTANT
    assert made.max_merge == 1
    made = resolve(CPUDIST_DELAYCOMPENSATION_ADAPTIVE="1")
    assert made.delay_compensation == cpudist.DelayCompensation(adaptive=True)
    chosen = cpudist.Async(delay_compensation=ADAPTIVE)
    made = resolve(chosen, CPUDIST_DELAYCOMPENSATION_MOMENTUM="0.5")
    assert (made.delay_compensation.factor, made.delay_compensation.momentum) == (
        0.5,
        0.5,
    )
    made = resolve(
        CPUDIST_DELAYCOMPENSATION_MOMENTUM="0.5", CPUDIST_DELAYCOMPENSATION_ADAPTIVE="1"
    )
    assert made.delay_compensation.resolved() == (2.0, True, 0.5, 1e-7)


def test_what_belongs_to_the_running_mean_is_refused_without_it():
    def body(context):
        with pytest.raises(ConfigurationError, match=r"\(momentum=0\.5\) without"):
            wrapped(Parts(), delay_compensation={})

    run(body, 1, variables={"CPUDIST_DELAYCOMPENSATION_MOMENTUM": "0.5"})


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (None, r"kind \(0 none, 1 constant, 2 adaptive\)"),
        (ADAPTIVE, r"kind \(0 none, 1 constant, 2 adaptive\)"),
        ({"factor": 0.25}, r"factor: 0\.2?5 against 0\.2?5"),
    ],
)
def test_trainers_that_differ_are_told(first, says):
    chosen = (first, CONSTANT)

    def body(context):
        wrapped(Parts(), delay_compensation=chosen[context.trainer_rank])

    with pytest.raises(
        cpudist.ConfigMismatchError, match=f"delay compensation, {says}"
    ):
        run(body, 2, 1)


def test_at_a_delay_of_16_the_loss_is_at_most_08_of_plain_async():
    """Plain Async converges at this learning rate; one setting serves all seeds."""
    cells = [(delay.PLAIN, delay.LR), (delay.CONSTANT, delay.LR)]
    plain, constant, adaptive = delay.losses([*cells, (delay.ADAPTIVE, delay.LR)])
    print(f"plain {plain}\nconstant {constant}\nadaptive {adaptive}")
    assert max(plain) < 2  # from above 5
    assert sum(constant) <= 0.8 * sum(plain)
    assert sum(adaptive) <= 0.8 * sum(plain)
