# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo: nothing that trainers moved is lost."""

from __future__ import annotations

import threading

import pytest
import torch
from geo_cases import (
    Moving,
    geo,
    gradients,
    model_sum,
    put_gradients,
    seeds_of,
    train,
    wrapped,
)
from patience import PATIENCE_S
from sync_cases import (
    KEY,
    assert_same_bits,
    copy_of,
    largest_difference,
    run,
)
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.launch.context import open_contexts

STEPS = 12
VALUES_BYTES = 4260  # on the server of two that has most of the model
# 60 more than the dense part, heads and a row of each table take.
CAP_BYTES = VALUES_BYTES + 5440


def train_all(trainers, servers, steps, strategy=None, missing=False, **options):
    """Every trainer's weights once all have left, and its exchanges."""

    def body(context):
        model = Moving()
        opt = wrapped(model, strategy or geo(3))
        rank = context.trainer_rank
        train(model, opt, seeds_of(rank, steps(rank)), missing=missing)
        opt.leave()
        context.barrier()
        opt.flush()
        return copy_of(model), opt.stats()["exchange"]

    results = run(body, trainers, servers, **options)
    seeds = [s for rank in range(trainers) for s in seeds_of(rank, steps(rank))]
    return results, model_sum(seeds, missing=missing)


def assert_all_equal(results, expected, tolerance=0.0):
    for found, _ in results:
        assert_same_bits(found, results[0][0])
        assert largest_difference(found, expected) <= tolerance


@pytest.mark.parametrize(("trainers", "servers"), [(1, 0), (1, 2), (2, 0), (2, 3)])
@pytest.mark.parametrize("missing", [False, True])
def test_the_servers_hold_everyones_movement(trainers, servers, missing):
    results, expected = train_all(trainers, servers, lambda _: STEPS, missing=missing)
    assert_all_equal(results, expected)


@pytest.mark.parametrize(("trainers", "servers"), [(3, 0), (4, 2)])
def test_with_trainers_that_finish_early(trainers, servers):
    results, expected = train_all(trainers, servers, lambda rank: 24 // (rank + 1) - 5)
    assert_all_equal(results, expected, tolerance=1e-3)


def test_with_a_trainer_that_makes_no_step():
    assert_all_equal(*train_all(2, 1, lambda rank: STEPS * rank))


@pytest.mark.parametrize("seed", range(3))
def test_over_lost_and_repeated_frames(seed):
    plan = _core.FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, cut=0.01, seed=seed)
    network = _core.InprocNetwork(plan)
    links = {"network": network, "variables": KEY if seed == 1 else None}
    assert_all_equal(*train_all(2, 2, lambda _: STEPS, **links))
    counts = network.counts()
    assert min(counts.dropped, counts.duplicated, counts.reordered) > 0


@pytest.mark.parametrize("servers", [0, 2])
def test_an_exchange_goes_in_parts_that_fit_the_servers_memory_cap(servers):
    capped = {"CPUDIST_SERVER_MEMORY_CAP_BYTES": str(CAP_BYTES)}
    results, expected = train_all(2, servers, lambda _: STEPS, variables=capped)
    assert_all_equal(results, expected)
    free, _ = train_all(2, servers, lambda _: STEPS)
    pushes = [found["exchanges"] for _, found in [*results, *free]]
    assert min(pushes[:2]) > max(pushes[2:])


def test_a_memory_cap_without_room_for_rows_is_refused():
    with pytest.raises(cpudist.OverloadedError, match="MEMORY_CAP_BYTES higher"):
        train_all(
            2,
            0,
            lambda _: 1,
            variables={"CPUDIST_SERVER_MEMORY_CAP_BYTES": str(VALUES_BYTES + 4500)},
        )


def test_a_barrier_leaves_all_with_the_same_model():
    """Also where numbers are rounded, and none has left before."""

    def body(context):
        model = Moving()
        opt = wrapped(model, geo(2), lr=0.1)
        states = []
        for epoch in range(3):
            train(model, opt, range(10 * epoch + context.trainer_rank, 10 * epoch + 7))
            context.barrier()
            opt.flush()
            states.append(copy_of(model))
            context.barrier()
        return states

    first, *others = run(body, 3, 2)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert_same_bits(one, two)


class Shared(nn.Module):
    """A table that two modules share, one of them with a padding row."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 2, sparse=True, padding_idx=4)
        self.same = nn.EmbeddingBag(9, 2, mode="sum", sparse=True)
        self.same.weight = self.words.weight
        with torch.no_grad():
            self.words.weight.copy_(torch.arange(18.0).view(9, 2))

    def forward(self, ids):
        return self.words(ids).sum() + 2 * self.same(ids, torch.tensor([0])).sum()


def test_shared_tables_and_padding():
    def body(context):
        model = Shared()
        opt = wrapped(model, geo(2))
        for ids in ([1, 1, 4], [], [4, 8], [0, 1]):
            opt.zero_grad()
            model(torch.tensor(ids, dtype=torch.long)).backward()
            opt.step()
        opt.leave()
        context.barrier()
        opt.flush()
        return model.words.weight.detach().clone()

    counts = torch.tensor([3.0, 9, 0, 0, 4, 0, 0, 0, 3])[:, None]
    expected = torch.arange(18.0).view(9, 2) - 2 * counts
    for found in run(body, 2, 2):
        assert found.equal(expected)


def test_a_movement_larger_than_a_message_travels_in_parts():
    rows, dim = 10_000, 1024  # 41 MB, where a push takes 32 MiB of a table

    def body(context):
        model = torch.nn.Embedding(rows, dim, sparse=True)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = wrapped(model, geo(1000))
        model(torch.arange(rows)).sum().backward()
        optimizer.step()
        optimizer.leave()
        context.barrier()
        optimizer.flush()
        # Contexts of other tests may be there still.
        run = [c for c in open_contexts if c.run_id == context.run_id]
        (server,) = [c.server for c in run if c.server is not None]
        # A bit per row and trainer, in words of 64.
        assert server.stats()["marks_bytes"] >= 2 * rows / 8
        context.barrier()  # a trainer that ends is forgotten
        return model.weight.detach(), optimizer.stats()["exchange"]

    for weight, stats in run(body, 2, 1):
        assert bool((weight == -1.0).all())
        assert stats["rows_sent"] == rows
        assert stats["exchanges"] > 1


@pytest.mark.parametrize(
    ("kind", "rule", "outer_step", "times"),
    [
        (torch.optim.SGD, "auto", None, 2.0),
        (torch.optim.SGD, "mean", None, 1.0),
        (torch.optim.Adagrad, "auto", None, "root"),
        (torch.optim.Adagrad, "auto", 1.0, 1.0),
        (torch.optim.Adagrad, "auto", 1.5, 1.5),
        (torch.optim.Adagrad, "mean", None, 1.0),
        (torch.optim.Adagrad, "auto", 9.0, 2.0),
        (torch.optim.Adagrad, "sum", None, 2.0),
    ],
)
def test_movements_add_up_or_are_averaged(kind, rule, outer_step, times):
    """Two trainers take the same step: so many times that is what they end with."""
    ready = threading.Barrier(2)

    def body(context):
        model = Moving()
        before = copy_of(model)
        communicator = {"merge_rule": rule}
        strategy = geo(100, communicator=communicator, outer_step=outer_step)
        inner = kind(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy)
        put_gradients(model, gradients(3))
        opt.step()
        own = copy_of(model)
        ready.wait(PATIENCE_S)
        opt.leave()
        context.barrier()
        opt.flush()
        return before, own, copy_of(model)

    for before, own, after in run(body, 2, 1):
        # The mean of dense parameters, which all trainers move at every step.
        of_rows, of_dense = (2**0.5, 1.0) if times == "root" else (times, times)
        expected = {
            name: before[name]
            + (of_rows if ".weight" in name else of_dense) * (own[name] - before[name])
            for name in own
        }
        tolerance = 1e-6 if times in (1.0, 2.0) else 1e-5
        assert largest_difference(after, expected) < tolerance


@pytest.mark.parametrize(
    ("kind", "rule", "averages"),
    [
        (torch.optim.SGD, "auto", False),
        (torch.optim.Adagrad, "auto", True),
        (torch.optim.Adagrad, "sum", False),
    ],
)
def test_tables_of_hybrid_are_averaged_by_their_own_rule(kind, rule, averages):
    def body(context):
        model = Moving()
        strategy = cpudist.Hybrid(
            dense="sync", sparse=cpudist.Geo(communicator={"merge_rule": rule})
        )
        opt = cpudist.DistributedOptimizer(
            kind(model.parameters(), lr=1.0), model, strategy
        )
        return opt.driver.sparse.averages

    assert run(body, 2, 1) == [averages] * 2
