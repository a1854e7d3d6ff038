# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo: optimizer state, before wrapping and after, and wrapping again."""

from __future__ import annotations

import copy

import pytest
import torch
from geo_cases import Moving, alone, geo, model_sum, steps, train, wrap
from sync_cases import (
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    largest_difference,
    run,
)

TORCH_RUNS = [name for name, rule in RULES.items() if rule.torch_runs_it]


def train_torch(name, count):
    model = Model()
    steps(build(RULES[name], model), model, Batches(1), 0, count)
    return copy_of(model)


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_equals_an_uninterrupted_one(name):
    batches = Batches(1, steps=12)

    def body(context):
        model = Model()
        opt = wrap(build(RULES[name], model), model)
        steps(opt, model, batches, 0, 6)
        weights, saved = copy_of(model), copy.deepcopy(opt.state_dict())
        steps(opt, model, batches, 6, 12)
        expected = copy_of(model)

        model = Model()
        model.load_state_dict(weights)
        opt = wrap(build(RULES[name], model), model)
        opt.load_state_dict(saved)
        steps(opt, model, batches, 6, 12)
        assert_same_bits(copy_of(model), expected)

    alone(body, servers=2)


@pytest.mark.parametrize("name", TORCH_RUNS)
def test_state_goes_to_torch_and_back(name):
    """Four steps of torch, four of Geo, four of torch: twelve of torch."""

    def body(context):
        model = Model()
        inners = build(RULES[name], model)
        steps(inners, model, Batches(1), 0, 4)
        dicts = [copy.deepcopy(inner.state_dict()) for inner in inners]
        opt = wrap(build(RULES[name], model), model)
        opt.load_state_dict({"optimizers": dicts})
        steps(opt, model, Batches(1), 4, 8)
        saved = copy.deepcopy(opt.state_dict()["optimizers"])
        opt.close()
        inners = build(RULES[name], model)
        for inner, one in zip(inners, saved, strict=True):
            inner.load_state_dict(one)
        steps(inners, model, Batches(1), 8, 12)
        return copy_of(model)

    assert largest_difference(alone(body), train_torch(name, 12)) <= 1e-6


@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("name", TORCH_RUNS)
def test_the_wrapped_optimizers_go_on_after_the_end(name, count):
    model = Model()
    inners = build(RULES[name], model)
    steps(inners, model, Batches(1), 0, 4)

    def body(context):
        steps(wrap(inners, model), model, Batches(1), 4, 4 + count)

    alone(body)
    steps(inners, model, Batches(1), 4 + count, 12)
    assert largest_difference(copy_of(model), train_torch(name, 12)) <= 1e-6


@pytest.mark.parametrize("name", TORCH_RUNS)
def test_an_optimizer_that_was_wrapped_for_nothing_is_as_before(name):
    model = Model()
    inners = build(RULES[name], model)
    alone(lambda context: wrap(inners, model).close())
    steps(inners, model, Batches(1), 0, 8)
    assert largest_difference(copy_of(model), train_torch(name, 8)) <= 1e-6


@pytest.mark.parametrize("name", TORCH_RUNS)
@pytest.mark.parametrize("order", ["geo sync", "sync geo", "geo geo"])
def test_wrapping_again_goes_on(name, order):
    def body(context):
        model = Model()
        inners = build(RULES[name], model)
        for i, strategy in enumerate(order.split()):
            opt = wrap(inners, model, geo(3) if strategy == "geo" else strategy)
            steps(opt, model, Batches(1), 6 * i, 6 * i + 6)
        opt.flush()
        return copy_of(model)

    assert largest_difference(alone(body), train_torch(name, 12)) <= 1e-6


@pytest.mark.parametrize("order", ["geo sync geo", "sync geo geo"])
def test_wrapping_again_takes_everyones_movement_over(order):
    def body(context):
        model = Moving()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        for i, name in enumerate(order.split()):
            opt = wrap(inner, model, geo(2) if name == "geo" else name)
            if name == "geo":
                train(
                    model,
                    opt,
                    [100 * context.trainer_rank + 10 * i + j for j in range(5)],
                )
        opt.leave()
        context.barrier()
        opt.flush()
        return copy_of(model)

    geos = [i for i, name in enumerate(order.split()) if name == "geo"]
    seeds = [100 * r + 10 * i + j for r in (0, 1) for i in geos for j in range(5)]
    for found in run(body, 2, 2):
        assert_same_bits(found, model_sum(seeds))


@pytest.mark.parametrize("name", TORCH_RUNS)
def test_wrapped_optimizers_go_on_after_two_strategies(name):
    """The table's state is the one Geo left: Sync's stays on its servers."""
    model = Model()
    inners = build(RULES[name], model)

    def body(context):
        steps(wrap(inners, model), model, Batches(1), 0, 4)
        wrap(inners, model, "sync").close()

    alone(body)
    steps(inners, model, Batches(1), 4, 8)
    assert largest_difference(copy_of(model), train_torch(name, 8)) <= 1e-6
