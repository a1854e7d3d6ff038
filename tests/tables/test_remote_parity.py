# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Remote tables train as static ones do, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
from remote_cases import (
    DIM,
    ROWS,
    Case,
    Model,
    assert_remote_equals_static,
    initial_rows,
    remote_model,
    rows_now,
    static_model,
)
from sync_cases import run

import torch_cpudist as cpudist

RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "row_wise": lambda p: cpudist.optim.RowWiseAdagrad(p, lr=0.1),
    "ftrl": lambda p: cpudist.optim.FTRL(p, lr=0.2, l1=0.01),
}


@pytest.mark.parametrize("servers", [0, 3])
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_sync(trainers, servers):
    assert_remote_equals_static(Case(cpudist.Sync, trainers, servers))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_begins_its_state_with_the_row(rule):
    assert_remote_equals_static(Case(cpudist.Sync, 2, 2, RULES[rule]))


def uneven(step, rank):
    """Batches of different sizes, some of them empty, one step without any."""
    return 0 if step == 3 else (3 * step + 2 * rank) % 5


@pytest.mark.parametrize("by_samples", [False, True])
def test_uneven_and_empty_batches(by_samples):
    assert_remote_equals_static(
        Case(cpudist.Sync, 2, 1, sizes=uneven, by_samples=by_samples)
    )


def test_accumulation():
    assert_remote_equals_static(Case(cpudist.Sync, 2, 2, parts=3))


@pytest.mark.parametrize("strategy", [cpudist.Sync, cpudist.Async])
def test_prefetch(strategy):
    trainers = 2 if strategy is cpudist.Sync else 1
    assert_remote_equals_static(
        Case(strategy, trainers, 2, ahead=2, settled=strategy is cpudist.Async)
    )


@pytest.mark.parametrize("clip", [cpudist.ClipNorm(0.05), cpudist.ClipValue(0.01)])
def test_clipping(clip):
    assert_remote_equals_static(Case(cpudist.Sync, 2, 2, clip=clip))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_rounded_values_and_what_is_rounded_off(dtype):
    strategy = functools.partial(cpudist.Sync, communicator={"wire_dtype": dtype})
    assert_remote_equals_static(Case(strategy, 2, 2))


def test_half_async_in_one_group():
    strategy = functools.partial(cpudist.HalfAsync, group=[[0, 1, 2]])
    assert_remote_equals_static(Case(strategy, 3, 2))


@pytest.mark.parametrize("servers", [0, 2])
def test_async_with_one_trainer(servers):
    assert_remote_equals_static(Case(cpudist.Async, 1, servers, settled=True))


@pytest.mark.parametrize("sparse", [cpudist.Sync, cpudist.Async])
@pytest.mark.parametrize("dense", [cpudist.AllReduce, cpudist.Sync])
def test_hybrid(dense, sparse):
    # Threads have no group of torch.distributed.
    trainers = 2 if sparse is dense is cpudist.Sync else 1

    def strategy():
        return cpudist.Hybrid(dense=dense(), sparse=sparse())

    assert_remote_equals_static(
        Case(strategy, trainers, 2, settled=sparse is cpudist.Async)
    )


def test_rows_that_nobody_trained_are_as_they_began():
    model, expected = remote_model(), dict(static_model().named_parameters())

    def body(context):
        made = cpudist.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model
        )
        before = rows_now(made)
        ids = torch.tensor([[1, 5, 7]])
        model(ids, torch.ones(1, 3)).sum().backward()
        made.step()
        return before, rows_now(made)

    ((before, after),) = run(body, 1, 2)
    for name in before:
        assert torch.equal(before[name], expected[name])
        changed = (after[name] != before[name]).any(dim=1).nonzero().flatten().tolist()
        # The bag leaves its padding out; the weight of `item` has one more module.
        assert changed == ([5, 7] if name == "bag.weight" else [1, 5, 7])


def test_the_seed_is_that_of_trainer_0():
    models = [remote_model(7), remote_model(8)]
    expected = initial_rows("item.weight", models[0].item.weight)
    assert not torch.equal(expected, initial_rows("item.weight", models[1].item.weight))

    def body(context):
        model = models[context.trainer_rank]
        made = cpudist.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model
        )
        return rows_now(made)["item.weight"]

    for rows in run(body, 2, 2):
        assert torch.equal(rows, expected)


def test_a_filled_weight_is_stored_freed_and_trains_alike():
    def shard(model):
        return cpudist.shard_tables(model, ROWS, remote=True)

    case = Case(cpudist.Sync, 2, 2)
    static = case.train([static_model() for _ in range(2)])
    # Filled alike, but lookups and gradients are the remote table's.
    remote = case.train([shard(static_model()) for _ in range(2)])
    for found, expected in zip(remote, static, strict=True):
        assert found.losses == expected.losses
        for name, rows in expected.rows.items():
            assert torch.equal(found.rows[name], rows), name


def test_async_trainers_apply_every_gradient_once():
    """Gradients are whole numbers, so that sums are exact in whatever order."""
    steps, trainers = 30, 3

    def build():
        with cpudist.remote_tables(names=["*"]):
            table = torch.nn.Embedding(ROWS, DIM)
            torch.nn.init.zeros_(table.weight)
        return table

    tables = [build() for _ in range(trainers)]
    batches = [
        torch.randint(
            0, ROWS, (steps, 8), generator=torch.Generator().manual_seed(rank)
        )
        for rank in range(trainers)
    ]

    def body(context):
        table = tables[context.trainer_rank]
        made = cpudist.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table, cpudist.Async()
        )
        for ids in batches[context.trainer_rank]:
            made.zero_grad()
            table(ids).sum().backward()
            made.step()
        cpudist.barrier()
        return rows_now(made)["weight"]

    counts = torch.bincount(torch.cat([b.flatten() for b in batches]), minlength=ROWS)
    for rows in run(body, trainers, 2):
        assert torch.equal(rows, -counts.float()[:, None].expand(ROWS, DIM))


def test_the_model_of_these_tests_looks_tables_up_in_all_ways():
    model = Model()
    assert model.last.weight is model.item.weight
