# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Values that travel in fewer bits: nothing is lost in sum, and training goes on.

What is held back of a value is at most half a unit of what travelled last: of ``int8``
half a scale, of ``fp16`` and ``bf16`` half of the last bit.
"""

from __future__ import annotations

import threading

import pytest
import torch
from async_cases import Counting, wrapped
from geo_cases import Moving, geo, model_sum, seeds_of
from geo_cases import train as train_geo
from geo_cases import wrapped as wrapped_geo
from patience import PATIENCE_S
from sync_cases import (
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    largest_difference,
    loss_of,
    run,
)

import torch_cpudist as cpudist
from torch_cpudist import _core, strategies
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch import environment

LOSSY = ("bf16", "fp16", "int8")
# Half a unit of a value of 1, or of a row whose largest is 1.
HALF_UNIT = {"bf16": 2**-9, "fp16": 2**-12, "int8": 0.51 / 127}
SMALL = {"min_block_size": 8}


def sync(dtype, **options):
    return cpudist.Sync(sharding=SMALL, communicator={"wire_dtype": dtype}, **options)


def train(strategy, batches, *, table=True, model_dtype=torch.float32, network=None):
    """Every trainer's model and loss after Sync training on the batches."""

    def body(context):
        model = Model(model_dtype, table)
        opt = cpudist.DistributedOptimizer(
            build(RULES["adagrad"], model), model, strategy=strategy
        )
        for step in range(len(batches)):
            opt.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            opt.step()
        opt.flush()
        with torch.no_grad():
            parts = [
                loss_of(model, batches.part(step, rank))
                for step in range(len(batches))
                for rank in range(batches.trainers)
            ]
        context.barrier()
        opt.flush()
        return copy_of(model), float(torch.stack(parts).mean())

    return run(body, batches.trainers, 2, network=network)


@pytest.mark.parametrize("dtype", LOSSY)
@pytest.mark.parametrize("name", ["async", "sync"])
def test_what_is_rounded_off_goes_with_a_later_push(name, dtype):
    steps = 60
    # Too small beside the largest of its row to travel as int8 by itself.
    row = torch.tensor([1.0, 0.0007, -0.3])
    dense = torch.linspace(-1.0, 1.0, 50) ** 3

    def body(context):
        model = Counting()
        communicator = {"wire_dtype": dtype, "pull_dtype": "fp32"}
        opt = wrapped(model, {"name": name, "communicator": communicator})
        for _ in range(steps):
            opt.zero_grad()
            looked_up = model.table(torch.tensor([3, 5, 3]))
            ((looked_up * row).sum() + (model.dense * dense).sum()).backward()
            opt.step()
        context.barrier()
        opt.flush()
        return copy_of(model)

    found = run(body, 2, 2)[0]
    plain = copy_of(Counting())
    times = steps * (2 if name == "async" else 1)
    held = HALF_UNIT[dtype] * (2 if name == "async" else 1) * 2.5 + 1e-3
    moved = plain["table.weight"] - found["table.weight"]
    assert (moved[5] - times * row).abs().max() < held
    assert (moved[3] - times * 2 * row).abs().max() < 2 * held
    assert moved[4].abs().max() == 0
    assert (plain["dense"] - found["dense"] - times * dense).abs().max() < held


@pytest.mark.parametrize("dtype", LOSSY)
def test_training_gets_as_far(dtype):
    batches = Batches(2)
    (exact, _), (_, loss) = train(sync("fp32"), batches)
    (found, found_loss), (other, _) = train(sync(dtype), batches)
    assert abs(found_loss - loss) < 0.02 * loss
    assert 0 < largest_difference(found, exact) < 0.1
    # A flush brings values as the servers have them.
    assert_same_bits(found, other)


def test_what_arrives_is_the_same_over_a_bad_network():
    batches = Batches(2, steps=10)
    plain = train(sync("int8"), batches)
    network = _core.InprocNetwork(
        _core.FaultPlan(seed=5, drop=0.1, duplicate=0.2, cut=0.02)
    )
    found = train(sync("int8"), batches, network=network)
    assert network.counts().cut > 0
    for (ours, _), (theirs, _) in zip(found, plain, strict=True):
        assert_same_bits(ours, theirs)


def test_float64_travels_as_it_is():
    batches = Batches(2, torch.float64, steps=10)
    options = {"table": False, "model_dtype": torch.float64}
    (exact, _), _ = train(sync("fp32"), batches, **options)
    (found, _), _ = train(sync("int8"), batches, **options)
    assert_same_bits(found, exact)


@pytest.mark.parametrize("rule", ["sum", "mean"])
@pytest.mark.parametrize("dtype", LOSSY)
def test_geo_leaves_nothing_behind(dtype, rule):
    trainers, steps = 3, 7
    ready = threading.Barrier(trainers)

    def body(context):
        model = Moving()
        strategy = geo(2, communicator={"wire_dtype": dtype, "merge_rule": rule})
        opt = wrapped_geo(model, strategy)
        train_geo(model, opt, seeds_of(context.trainer_rank, steps))
        opt.flush()
        ready.wait(PATIENCE_S)  # nobody learns that there are fewer trainers
        opt.leave()
        context.barrier()
        opt.flush()
        return copy_of(model)

    found = run(body, trainers, 2)
    every = [seed for rank in range(trainers) for seed in seeds_of(rank, steps)]
    # Movements are no whole numbers any more: sums round.
    share = 1 / trainers if rule == "mean" else 1.0
    assert largest_difference(found[0], model_sum(every, share)) < 1e-4
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_rows_of_batches_to_come_are_those_of_a_lookup():
    batches = Batches(2, steps=8)

    def body(context):
        finals = []
        for ahead in (False, True):
            model = Model()
            opt = cpudist.DistributedOptimizer(
                build(RULES["adagrad"], model), model, strategy=sync("int8")
            )
            for step in range(len(batches)):
                batch = batches.part(step, context.trainer_rank)
                if ahead and step + 1 < len(batches):
                    coming = batches.part(step + 1, context.trainer_rank)
                    opt.prefetch({model.bag: coming[0]})
                opt.zero_grad()
                loss_of(model, batch).backward()
                opt.step()
            context.barrier()
            opt.flush()
            finals.append(copy_of(model))
        assert_same_bits(*finals)

    run(body, 2, 2)


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "half_async", "group": [[0], [1]]},
        {"name": "geo", "push_every": 2, "outer": {}},
        {
            "name": "async",
            "max_staleness": 2,
            "delay_compensation": {"factor": 0.1},
        },
    ],
)
def test_every_strategy_with_servers_rounds(strategy):
    def body(context):
        model = Counting()
        opt = wrapped(model, strategy | {"communicator": {"wire_dtype": "int8"}}, 0.1)
        for step in range(6):
            opt.zero_grad()
            ids = torch.arange(step, step + 4)
            (model.table(ids).sum() / 3 + model.dense.sum() / 7).backward()
            opt.step()
        context.barrier()
        opt.flush()
        return copy_of(model)

    first, second = run(body, 2, 2)
    assert_same_bits(first, second)
    assert (first["dense"] - Counting().dense).abs().max() > 0.05


def test_the_dense_part_of_hybrid_may_have_its_own():
    chosen = cpudist.Hybrid(
        dense=cpudist.Sync(communicator={"wire_dtype": "bf16"}),
        sparse=cpudist.Async(communicator={"wire_dtype": "int8"}),
    )

    def body(context):
        model = Model()
        opt = cpudist.DistributedOptimizer(
            build(RULES["adagrad"], model), model, strategy=chosen
        )
        batches = Batches(2, steps=4)
        for step in range(len(batches)):
            opt.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            opt.step()
        context.barrier()
        opt.flush()
        return copy_of(model)

    assert_same_bits(*run(body, 2, 2))


def test_trainers_must_agree():
    def body(context):
        dtype = "int8" if context.trainer_rank == 0 else "bf16"
        wrapped(Counting(), sync(dtype)).step()

    with pytest.raises(cpudist.ConfigMismatchError, match=r"wire_dtype: .* against"):
        run(body, 2, 1)


def test_settings():
    chosen = cpudist.Communicator
    assert chosen().pulled_dtype == "fp32"
    assert chosen(wire_dtype="bf16").pulled_dtype == "bf16"
    assert chosen(wire_dtype="int8").pulled_dtype == "fp16"
    assert chosen(wire_dtype="int8", pull_dtype="fp32").pulled_dtype == "fp32"
    with pytest.raises(ConfigurationError, match="Valid: bf16, fp16, fp32"):
        chosen(pull_dtype="int8")
    for kind in (cpudist.Sync, cpudist.HalfAsync, cpudist.Geo):
        with pytest.raises(ConfigurationError, match="has no queue of pushes"):
            kind(communicator={"max_merge": 3})
    variables = {
        "CPUDIST_COMMUNICATOR_WIRE_DTYPE": "int8",
        "CPUDIST_COMMUNICATOR_MAX_MERGE": "3",
    }
    said = environment.parse(variables)
    made = strategies.resolve("sync", None, said.values, said.server)
    assert made.communicator == chosen(wire_dtype="int8")  # the other one is reported
    made = strategies.resolve("async", None, said.values, said.server)
    assert made.communicator == chosen(wire_dtype="int8", max_merge=3)
