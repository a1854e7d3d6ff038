# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo with an outer optimizer: a step on the mean of the trainers' movements."""

from __future__ import annotations

import threading

import pytest
import torch
from async_cases import Counting, backward, gradient_of, seeds_of, wrapped
from patience import PATIENCE_S
from sync_cases import run

import torch_cpudist as cpudist
from torch_cpudist.errors import ConfigurationError

EPOCHS, STEPS = 3, 4
NESTEROV = {"lr": 0.5, "momentum": 0.5, "nesterov": True}
HEAVY_BALL = {"lr": 0.25, "momentum": 0.5}


def geo(outer, **options):
    sharding = cpudist.Sharding(min_block_size=8)
    options = {"push_every": 1000, "exchange_budget": 1.0, **options}
    return cpudist.Geo(outer=outer, sharding=sharding, **options)


def step(model, optimizer, seed):
    optimizer.zero_grad()
    backward(model, seed)
    optimizer.step()


def epoch_seeds(rank, epoch):
    return seeds_of(rank, EPOCHS * STEPS)[epoch * STEPS : (epoch + 1) * STEPS]


def train(context, outer):
    """Exchanges at barriers only, so that every outer step is known."""
    model = Counting()
    optimizer = wrapped(model, geo(outer))
    for epoch in range(EPOCHS):
        for seed in epoch_seeds(context.trainer_rank, epoch):
            step(model, optimizer, seed)
        context.barrier()
    optimizer.leave()
    context.barrier()
    optimizer.flush()
    return {name: value.clone() for name, value in model.state_dict().items()}


def replay(trainers, outer):
    """torch's SGD on mean movements; on rows lazily, those that somebody touched."""
    model = Counting()
    torch_sgd = torch.optim.SGD([model.dense], **outer)
    weight = model.table.weight.detach()
    buffer = torch.zeros_like(weight)
    begun = torch.zeros(len(weight), dtype=torch.bool)
    for epoch in range(EPOCHS):
        moved, dense = torch.zeros_like(weight), torch.zeros_like(model.dense)
        touched = torch.zeros(len(weight), dtype=torch.bool)
        for rank in range(trainers):
            for seed in epoch_seeds(rank, epoch):
                ids, rows, gradient = gradient_of(seed)
                moved.index_add_(0, ids, rows / trainers)
                dense += gradient / trainers
                touched[ids] = True
        model.dense.grad = dense.detach()
        torch_sgd.step()
        updated = torch.where(begun[:, None], outer["momentum"] * buffer, 0.0) + moved
        buffer = torch.where(touched[:, None], updated, buffer)
        begun |= touched
        ahead = moved + outer["momentum"] * buffer
        direction = ahead if outer.get("nesterov") else buffer
        weight -= torch.where(touched[:, None], outer["lr"] * direction, 0.0)
    return model.state_dict()


@pytest.mark.parametrize("outer", [NESTEROV, HEAVY_BALL], ids=["nesterov", "momentum"])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 0), (4, 3)])
def test_equals_sgd_on_the_mean_movement(trainers, servers, outer):
    expected = replay(trainers, outer)
    for found in run(lambda context: train(context, outer), trainers, servers):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_in_the_background_all_end_with_the_same_weights():
    def body(context):
        model = Counting()
        optimizer = wrapped(model, geo(NESTEROV, push_every=3), lr=0.125)
        for seed in seeds_of(context.trainer_rank, 20 + 5 * context.trainer_rank):
            step(model, optimizer, seed)
        optimizer.leave()
        context.barrier()
        optimizer.flush()
        return dict(model.state_dict()), optimizer.stats()["exchange"]

    (first, stats), *others = run(body, 3, 2)
    assert stats["exchanges"] > 1
    assert not torch.equal(first["dense"], Counting().dense)
    for found, _ in others:
        for name, value in first.items():
            assert torch.equal(found[name], value), name


def test_a_flush_waits_for_nobody_and_a_leaver_is_not_waited_for():
    others_are_done = threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, geo({}, push_every=2))
        if context.trainer_rank == 0:
            for seed in seeds_of(0, 6):
                step(model, optimizer, seed)  # its first exchange waits for trainer 1
            optimizer.flush()
            others_are_done.set()
        else:
            assert others_are_done.wait(PATIENCE_S)
            step(model, optimizer, 1000)
            optimizer.leave()
        context.barrier()
        optimizer.flush()
        return optimizer.rounds

    assert run(body, 2, 1)[0] >= 6


def test_while_an_outer_step_waits_its_trainer_does_all_else():
    """Trainer 1 hands nothing on until trainer 0 has done all that asks the servers."""
    others_are_done = threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, geo({}, push_every=2))
        if context.trainer_rank == 0:
            for seed in seeds_of(0, 4):
                step(model, optimizer, seed)
            assert optimizer.stats()["exchange"]["exchanges"] == 0  # it waits
            optimizer.flush()
            optimizer.flush("dense")
            assert optimizer.state_dict()["param_groups"]
            assert model.table(torch.arange(3)).isfinite().all()
            assert cpudist.global_step() == 4
            for seed in seeds_of(0, 4):
                step(model, optimizer, seed)
            others_are_done.set()
        else:
            assert others_are_done.wait(PATIENCE_S)
            for seed in seeds_of(1, 2):
                step(model, optimizer, seed)
        context.barrier()
        optimizer.flush()
        return optimizer.stats()["exchange"]["exchanges"]

    assert min(run(body, 2, 1)) >= 1


def test_settings_that_do_not_fit_are_refused():
    def body(context):
        with pytest.raises(ConfigurationError, match="needs a momentum"):
            wrapped(Counting(), geo({"nesterov": True}))

    run(body, 1)
    with pytest.raises(ConfigurationError, match="at least 1e-06"):
        cpudist.Outer(lr=0)
    with pytest.raises(ConfigurationError, match="did you mean momentum"):
        cpudist.Geo(outer={"momentun": 0.9})
    with pytest.raises(ConfigurationError, match="steps on the mean"):
        cpudist.Geo(outer={}, communicator={"merge_rule": "sum"})


def test_what_would_wait_for_each_other_is_refused():
    with pytest.raises(ConfigurationError, match="both wait for the other trainers"):
        cpudist.Hybrid(dense=cpudist.Sync(), sparse=cpudist.Geo(outer={}))

    def body(context):
        first, second = Counting(), Counting()
        kept = wrapped(first, geo({}))
        with pytest.raises(ConfigurationError, match="close\\(\\) the other one first"):
            wrapped(second, "sync")
        kept.close()
        wrapped(second, "sync")

    run(body, 1)


def test_after_a_barrier_a_flush_brings_the_last_outer_step():
    """Also to a trainer that has not moved since its last one."""

    def body(context):
        model = Counting()
        optimizer = wrapped(model, geo(HEAVY_BALL))
        for epoch in range(2):
            if epoch == 0 or context.trainer_rank == 0:
                step(model, optimizer, epoch_seeds(context.trainer_rank, epoch)[0])
            context.barrier()
        optimizer.flush()
        return dict(model.state_dict())

    first, second = run(body, 2, 2)
    for name, value in first.items():
        assert torch.equal(second[name], value), name
