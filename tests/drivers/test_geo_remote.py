# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo over remote tables: a trainer has the rows that it has updated, and no others."""

from __future__ import annotations

import threading

import pytest
import torch
from geo_cases import exchange, geo, seeds_of
from geo_rows import Rows, push
from patience import PATIENCE_S
from remote_cases import (
    DIM,
    ROWS,
    Case,
    assert_remote_equals_static,
    remote,
    remote_embedding,
    rows_now,
    wrap,
)
from sync_cases import run
from table_cases import alone
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.optim import RowWiseAdagrad

RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    "row_wise_adagrad": lambda p: RowWiseAdagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "decayed": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("servers", [0, 2])
def test_one_trainer_equals_static_tables(name, servers):
    assert_remote_equals_static(
        Case(lambda: geo(2), servers=servers, optimizer=RULES[name])
    )


@pytest.mark.parametrize(
    "options",
    [{"parts": 2}, {"ahead": 2}, {"settled": True}, {"clip": cpudist.ClipValue(0.01)}],
    ids=str,
)
def test_one_trainer_equals_static_tables_in_a_loop_of(options):
    assert_remote_equals_static(Case(lambda: geo(2), **options))


def test_tables_of_hybrid():
    strategy = cpudist.Hybrid(sparse=geo(2, sharding={}))
    assert_remote_equals_static(Case(lambda: strategy))


def score(model, part):
    ids, target = part
    return (model.vector[:DIM] + model.first(ids) - target).square().mean()


def test_replicas_equal_those_of_static_tables():
    def body(make):
        model = make()
        inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
        opt = wrap(model, geo(2), inner)
        generator = torch.Generator().manual_seed(1)
        with cpudist.ReplicaExecutor(model, score, opt, replicas=2) as executor:
            for _ in range(6):
                ids = torch.randint(0, ROWS, (12,), generator=generator)
                executor.run((ids, torch.randn(12, DIM, generator=generator)))
        return rows_now(opt)

    static = alone(lambda: body(lambda: cpudist.shard_tables(Rows(), min_rows=1)))
    found = alone(lambda: body(lambda: remote(Rows)))
    assert static["first.weight"].abs().max() > 0
    for name, rows in static.items():
        assert torch.equal(found[name], rows), name


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_flush_between_forward_and_step(trainers):
    """Others' movement of a row without a slot is not lost to the one it gets then."""

    together = threading.Barrier(trainers)
    modules = [remote(Rows).first for _ in range(trainers)]

    def body(context):
        module = modules[context.trainer_rank]
        opt = wrap(module, geo(1))
        for step in range(4):
            loss = module(torch.tensor([step, 30])).sum()
            together.wait(PATIENCE_S)
            if context.trainer_rank == 1:
                opt.zero_grad()
                module(torch.tensor([step])).sum().backward()
                opt.step()
                opt.flush()
            together.wait(PATIENCE_S)
            opt.flush()
            if context.trainer_rank == 0:
                opt.zero_grad()
                loss.backward()
                opt.step()
            together.wait(PATIENCE_S)
        context.barrier()
        opt.flush()
        return rows_now(opt)["weight"][:, 0].tolist()

    expected = [0.0] * ROWS
    for step in range(4):
        expected[step] -= trainers
        expected[30] -= 1
    assert run(body, trainers, 1) == [expected] * trainers


@pytest.mark.parametrize("cache_bytes", [1 << 20, 700, 0])
def test_outer_steps_equal_those_of_static_tables(cache_bytes):
    outer = cpudist.Outer(lr=0.5, momentum=0.5, nesterov=True)

    def body(context, models):
        model = models[context.trainer_rank]
        opt = wrap(model, geo(2**31 - 1, outer=outer, cache_bytes=cache_bytes))
        seeds = iter(seeds_of(context.trainer_rank, 12))
        for _ in range(4):
            for _ in range(3):
                push(model, opt, next(seeds))
            # Both wait for each other's movement.
            opt.trained.exchange.begin(whole=False, step=(0, 0), steps=3, samples=0)
            exchange(opt, "finish")
        return rows_now(opt), opt.stats()["exchange"]["retired_rows"]

    static = [cpudist.shard_tables(Rows(), min_rows=1) for _ in range(2)]
    made = [remote(Rows) for _ in range(2)]
    expected = run(lambda context: body(context, static), 2, 2)
    found = run(lambda context: body(context, made), 2, 2)
    for (rows, retired), (others, _) in zip(found, expected, strict=True):
        for name, values in others.items():
            assert torch.equal(rows[name], values), name
        assert (retired > 0) == (cache_bytes < 1 << 20)


# -- open tables -----------------------------------------------------------------------


def test_tables_of_any_key():
    keys = [-1, 2**62, 7, -(2**63)]

    def body(context):
        module = cpudist.Embedding(DIM, initial=cpudist.Constant(1.0))
        opt = wrap(module, geo(2))
        for step in range(5):
            opt.zero_grad()
            chosen = keys[step % 4 :: 2] if context.trainer_rank else keys
            module(torch.tensor(chosen)).sum().backward()
            opt.step()
        opt.leave()
        context.barrier()
        opt.flush()
        with torch.no_grad():
            rows = module(torch.tensor([*keys, 99]))[:, 0]
        return rows.tolist(), opt.table_stats()["weight"]["rows"]

    other = [sum(key in keys[step % 4 :: 2] for step in range(5)) for key in keys]
    expected = [1.0 - 5 - count for count in other] + [1.0]
    assert run(body, 2, 2) == [(expected, len(keys))] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"admission": cpudist.CountFilter(2)},
        {"admission": cpudist.Probability(0.5)},
        {"eviction": cpudist.Evict(unseen_steps=3)},
        {"unknown": "zeros"},
        {"max_rows": 100},
    ],
    ids=str,
)
def test_tables_whose_rows_go_are_refused_by_name(options):
    module = cpudist.Embedding(DIM, **options)

    def body():
        for strategy in (geo(2), cpudist.Hybrid(sparse=cpudist.Geo())):
            with pytest.raises(cpudist.UnsupportedModelError) as caught:
                wrap(nn.Sequential(module, nn.Linear(DIM, 1)), strategy)
            assert next(iter(options)) in str(caught.value)
            assert "0.weight" in str(caught.value)
            assert "Async" in str(caught.value)

    alone(body)


# -- refused ---------------------------------------------------------------------------


def test_a_row_that_was_not_looked_up_is_refused():
    def body():
        module = remote_embedding()
        opt = wrap(module, geo(2))
        module(torch.tensor([3])).sum().backward()
        opt.step()
        with pytest.raises(cpudist.UnpulledRowError):
            opt.step()  # the gradient is of the step before
        opt.zero_grad()
        with pytest.raises(cpudist.RowOutOfRangeError):
            module(torch.tensor([ROWS]))
        return opt.stats()["exchange"]["slot_rows"]

    assert alone(body) == 1


def test_cache_bytes_is_checked():
    for wrong in (-1, 1.5, "many"):
        with pytest.raises(cpudist.ConfigurationError, match="cache_bytes"):
            cpudist.Geo(cache_bytes=wrong)
