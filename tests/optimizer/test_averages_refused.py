# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where no average is kept or shown, and what is refused while one is."""

from __future__ import annotations

import pytest
import torch
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
from torch_cpudist.served.room import needs

DECAY = 0.8


def test_steps_inside_are_refused_and_the_values_come_back():
    batches = Batches(1, steps=2)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, average=cpudist.EMA(DECAY)
        )
        optimizer.zero_grad()
        loss_of(model, batches.part(0, 0)).backward()
        optimizer.step()
        values = copy_of(model)
        calls = [
            optimizer.step,
            optimizer.flush,
            optimizer.join,
            optimizer.store_model,
            optimizer.state_dict,
            cpudist.barrier,
            lambda: optimizer.load_state_dict({}),
            lambda: optimizer.averaged().__enter__(),
            lambda: cpudist.DistributedOptimizer(optimizer.inners, model),
        ]
        with optimizer.averaged():
            for call in calls:
                with pytest.raises(cpudist.InvalidArgumentError, match="averaged"):
                    call()
        with pytest.raises(RuntimeError, match="mine"), optimizer.averaged():
            raise RuntimeError("mine")
        assert_same_bits(copy_of(model), values)
        # A gradient of averages is none of values.
        with optimizer.averaged():
            optimizer.zero_grad()
            loss_of(model, batches.part(1, 0)).backward()
        with pytest.raises(cpudist.UnpulledRowError):
            optimizer.step()

    run(body, 1)


def test_what_is_written_inside_is_told():
    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, average=cpudist.EMA(DECAY)
        )
        values = copy_of(model)

        def load():
            with optimizer.averaged():
                with torch.no_grad():
                    model.first.bias.fill_(42.0)
                    model.bag.weight.fill_(42.0)

        with pytest.raises(cpudist.ModelChangedError, match="2 parameters"):
            load()
        assert_same_bits(copy_of(model), values)
        # Training goes on.
        loss_of(model, Batches(1, steps=1).part(0, 0)).backward()
        optimizer.step()

    run(body, 1)


def test_what_is_written_inside_goes_also_where_it_fails_then(caplog):
    """Or the averages would stand in the place of values, and be stored as such."""

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, average=cpudist.EMA(DECAY)
        )
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, Batches(1, steps=1).part(0, 0)).backward()
            optimizer.step()
        values = copy_of(model)

        def evaluate():
            with optimizer.averaged():
                with torch.no_grad():
                    model.bag.weight.fill_(42.0)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            evaluate()
        assert_same_bits(copy_of(model), values)
        optimizer.zero_grad()
        loss_of(model, Batches(1, steps=1).part(0, 0)).backward()
        optimizer.step()

    run(body, 1)
    assert "1 parameters were written inside of opt.averaged()" in caplog.text


def test_without_an_average_there_is_none_to_show():
    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model)
        with (
            pytest.raises(cpudist.InvalidArgumentError, match=r"EMA\(0\.999\)"),
            optimizer.averaged(),
        ):
            pass

    run(body, 1)


@pytest.mark.parametrize("strategy", ["geo", "allreduce", "reduce", "localsgd"])
def test_trainers_that_step_keep_their_own_averages(strategy):
    def body(context):
        model = nn.Linear(2, 2)
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="AveragedModel"):
            cpudist.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model,
                strategy=strategy,
                average=cpudist.EMA(),
            )

    run(body, 1)


def test_hybrid_names_its_parts():
    def body(context):
        model = Model()
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="Hybrid"):
            cpudist.DistributedOptimizer(
                build(RULES["sgd"], model),
                model,
                strategy=cpudist.Hybrid(),
                average=cpudist.EMA(),
            )

    run(body, 1)


@pytest.mark.parametrize("decay", [0, 1, -0.5, 1.5, float("nan"), "0.9", None])
def test_decays_that_are_none(decay):
    with pytest.raises(cpudist.InvalidArgumentError, match="decay"):
        cpudist.EMA(decay)


def test_averages_that_are_none():
    def body(context):
        model = Model()
        with pytest.raises(cpudist.InvalidArgumentError, match=r"EMA\(0\.999\)"):
            cpudist.DistributedOptimizer(
                build(RULES["sgd"], model), model, average=0.999
            )

    run(body, 1)


def test_trainers_with_other_decays_are_told():
    def body(context):
        model = Model()
        decay = 0.5 + 0.25 * context.trainer_rank
        made = []

        def train():
            made.append(
                cpudist.DistributedOptimizer(
                    build(RULES["sgd"], model), model, average=cpudist.EMA(decay)
                )
            )
            made[0].step()  # trainer 0 waits for nobody before

        with pytest.raises(cpudist.ConfigMismatchError, match="decay of the average"):
            train()
        for optimizer in made:
            optimizer.close(tell_servers=False)

    run(body, 2)


def test_the_average_counts_as_memory():
    def body(context):
        made = []
        for average in (None, cpudist.EMA()):
            model = Model()
            optimizer = cpudist.DistributedOptimizer(
                build(RULES["sgd"], model), model, average=average
            )
            made.append(needs(optimizer.trained.placement, steps_here=False)[0])
        return made[1].server_bytes - made[0].server_bytes

    assert run(body, 1) == [16]
