# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prefetch where updates are applied on arrival: rows are old, and counted as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from async_cases import (
    Counting,
    all_seeds,
    alone,
    asynchronous,
    backward,
    gradient_of,
    model_sum,
    seeds_of,
    wrapped,
)
from sync_cases import assert_same_bits, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.testing import Turns

QUEUE = {"send_queue_size": 2}


@pytest.mark.parametrize("faults", [False, True], ids=["whole", "faults"])
@pytest.mark.parametrize("depth", [1, 3])
def test_every_gradient_is_applied_once(depth: int, faults: bool) -> None:
    steps = 15

    def body(context: cpudist.Context) -> Any:
        model = Counting()
        opt = wrapped(model, asynchronous(QUEUE))
        seeds = seeds_of(context.trainer_rank, steps)
        for seed in cpudist.data.prefetch(
            seeds, opt, lambda seed: {model.table: gradient_of(seed)[0]}, depth
        ):
            opt.zero_grad()
            backward(model, seed)
            opt.step()
        stats = opt.stats()
        opt.leave()
        context.barrier()
        opt.flush()
        return dict(model.state_dict()), stats

    plan = _core.FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, cut=0.01, seed=5)
    network = _core.InprocNetwork(plan) if faults else None
    for found, stats in run(body, 2, 2, network=network):
        assert_same_bits(found, model_sum(all_seeds(2, steps)))
        assert stats["rows_pulled"] == 0 or faults
        assert stats["prefetch_hits"] > 0
        assert stats["prefetch_refreshed"] == 0


def drained_steps(
    model: nn.Embedding, opt: Any, depth: int, steps: int = 8
) -> list[list[float]]:
    """Steps with a gradient of one, each applied before the next; what lookups saw."""
    seen = []
    loader: Any = [torch.tensor([0, 7 + step]) for step in range(steps)]
    if depth:
        loader = cpudist.data.prefetch(loader, opt, lambda b: {model: b}, depth)
    for ids in loader:
        opt.zero_grad()
        out = model(ids)
        seen.append(out.detach().flatten().tolist())
        out.sum().backward()
        opt.step()
        opt.flush("none")
    return seen


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_row_is_as_old_as_it_has_waited_and_counted_so(depth: int) -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(20, 1, sparse=True)
        with torch.no_grad():
            model.weight.zero_()
        opt = wrapped(model, cpudist.Async())
        seen = drained_steps(model, opt, depth)
        assert seen == [[float(-max(0, k - depth)), 0.0] for k in range(8)]
        stats = opt.stats()
        ages = [min(k, depth) for k in range(8)]
        assert stats["staleness"]["steps_max"] == depth
        assert stats["staleness"]["steps_mean"] == sum(ages) / 8
        if depth:
            assert stats["rows_pulled"] == 0
            assert stats["prefetch_hits"] == 16
            assert stats["rows_prefetched"] == 16

    alone(body)


def test_a_row_waits_for_the_gradient_that_uses_it() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(20, 1, sparse=True)
        opt = wrapped(model, cpudist.Async())
        opt.prefetch({model: torch.tensor([1])})
        for _ in range(3):  # gradients of other rows are as new as ever
            opt.zero_grad()
            model(torch.tensor([2])).sum().backward()
            opt.step()
            opt.flush("none")
        assert opt.stats()["staleness"]["steps_max"] == 0
        opt.zero_grad()
        model(torch.tensor([1])).sum().backward()
        opt.step()
        opt.flush("none")
        assert opt.stats()["staleness"]["steps_max"] == 3

    alone(body)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_compensation_compares_with_what_was_read(micro_batches: int) -> None:
    factor, depth, lr = 0.5, 2, 0.25

    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(4, 1, sparse=True)
        with torch.no_grad():
            model.weight.fill_(1.0)
        strategy = cpudist.Async(delay_compensation={"factor": factor})
        opt = wrapped(model, strategy, lr=lr)
        batch = torch.tensor([0])
        loader = cpudist.data.prefetch([batch] * 12, opt, lambda b: {model: b}, depth)
        history = [1.0]  # after every update
        reads: list[int] = []  # of each micro-batch, the updates before its reading
        for k, ids in enumerate(loader):
            if k % micro_batches == 0:
                opt.zero_grad()
            done = len(history) - 1
            declared = max(0, k - depth)
            reads.append(declared // micro_batches)
            out = model(ids)
            first = k - k % micro_batches
            read = history[reads[first]]  # the row stays for the whole step
            assert out.item() == pytest.approx(read)
            (out.sum() * 2.0).backward()
            if k % micro_batches + 1 < micro_batches:
                continue
            opt.step()
            opt.flush("none")
            gradient = 2.0 * micro_batches
            now = history[done]
            gradient += factor * gradient * gradient * (now - read)
            history.append(now - lr * gradient)
        assert opt.stats()["rows_pulled"] == 0
        opt.flush()
        assert model.weight[0].item() == pytest.approx(history[-1])
        plain = 1.0 - lr * 24.0
        assert abs(history[-1] - plain) > 0.1

    alone(body)


def test_a_bound_on_staleness_refuses_prefetch() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Embedding(4, 1, sparse=True)
        opt = wrapped(model, cpudist.Async(max_staleness=2))
        with pytest.raises(cpudist.InvalidArgumentError, match="max_staleness"):
            opt.prefetch({model: torch.tensor([0])})

    alone(body)


def test_what_other_groups_change_comes_with_the_own_round() -> None:
    turns = Turns([0, 1, 0])

    def body(context: cpudist.Context) -> Any:
        model = nn.Embedding(8, 1, sparse=True)
        with torch.no_grad():
            model.weight.zero_()
        opt = wrapped(model, cpudist.HalfAsync(group=[[0], [1]]))
        seen: list[float] = []

        def step(row: int) -> None:
            opt.zero_grad()
            out = model(torch.tensor([row]))
            out.sum().backward()
            opt.step()
            seen.append(out.item())

        def turn(position: int) -> None:
            if position == 0:
                opt.prefetch({model: torch.tensor([5])})
            elif position == 1:
                step(5)
            else:
                step(2)
                step(5)

        turns.take(context.trainer_rank, turn)
        return seen, opt.stats()["rows_pulled"], opt.stats()["prefetch_refreshed"]

    first, second = run(body, 2, 1)
    assert first == ([0.0, -1.0], 1, 1)
    assert second == ([0.0], 1, 0)


def test_rows_of_a_batch_that_is_used_in_part_do_not_stay_as_they_were() -> None:
    def body(context: cpudist.Context) -> list[float]:
        model = torch.nn.Embedding(4, 1, sparse=True)
        with torch.no_grad():
            model.weight.fill_(1.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.25)
        optimizer = cpudist.DistributedOptimizer(inner, model, strategy="async")
        optimizer.prefetch({model: torch.tensor([0, 1])})
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            row = model(torch.tensor([0]))
            row.sum().backward()
            optimizer.step()
            optimizer.flush("none")
            seen.append(row.item())
        return seen

    assert run(body, 1)[0] == [1.0, 0.75, 0.5]
