# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Averages that servers keep beside the values, against torch's own."""

from __future__ import annotations

import threading

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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_cpudist as cpudist
from torch_cpudist.tables.remote_weight import is_remote

DECAY = 0.8
STEPS = 24


def plain_averages(rule, batches, decay=DECAY):
    """torch's average, in float64, after every step on the joined batches."""
    model = Model(torch.float64)
    model.bag.double()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizers = build(RULES[rule], model)
    seen = []
    for step in range(len(batches)):
        ids, dense, target = batches.joined(step)
        model.zero_grad()
        loss_of(model, (ids, dense.double(), target.double())).backward()
        for optimizer in optimizers:
            optimizer.step()
        averaged.update_parameters(model)
        seen.append(copy_of(averaged.module))
    return seen


def shown_of(model):
    """The model's state, with the rows of a remote table as lookups bring them."""
    found = copy_of(model)
    if is_remote(model.bag.weight):
        assert "bag.weight" not in found
        with torch.no_grad():
            every = torch.arange(model.bag.num_embeddings)[:, None]
            found["bag.weight"] = model.bag(every)
    return found


def trained(
    batches, rule, strategy="sync", every=5, average=None, remote=False, **options
):
    """What averaged() shows after every so many steps, and the model at the end."""
    kept = cpudist.EMA(DECAY) if average is None else average
    meeting = threading.Barrier(batches.trainers)

    def body(context):
        model = Model()
        if remote:
            cpudist.shard_tables(model, remote=["bag"])
        optimizer = cpudist.DistributedOptimizer(
            build(RULES[rule], model), model, strategy=strategy, average=kept
        )
        assert is_remote(model.bag.weight) == remote
        shown = {}
        for step in range(len(batches)):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            optimizer.step()
            if step % every == 0 or step + 1 == len(batches):
                optimizer.flush()
                meeting.wait(PATIENCE_S)
                before = shown_of(model)
                with optimizer.averaged():
                    shown[step] = shown_of(model)
                assert_same_bits(before, shown_of(model))
                meeting.wait(PATIENCE_S)
        return shown, shown_of(model)

    return run(body, batches.trainers, **options)


def assert_close(found, wanted, most):
    assert "bag.weight" in found
    for name, value in found.items():
        assert float((value.double() - wanted[name].double()).abs().max()) <= most, name


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_sync_keeps_the_average_that_torch_does(trainers, servers, remote):
    batches = Batches(trainers, steps=STEPS)
    wanted = plain_averages("adagrad", batches)
    values = wanted[-1]
    for shown, last in trained(batches, "adagrad", remote=remote, servers=servers):
        assert len(shown) > 4
        for step, found in shown.items():
            assert_close(found, wanted[step], 2e-6)
        # It is not the last value that is shown.
        assert max(float((last[n] - values[n]).abs().max()) for n in last) > 1e-3


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize("rule", ["sgd", "sparse_adam", "row_wise_adagrad"])
def test_every_rule_is_averaged_alike(rule, remote):
    batches = Batches(2, steps=STEPS)
    wanted = plain_averages(rule, batches)
    for shown, _ in trained(batches, rule, remote=remote, servers=2):
        for step, found in shown.items():
            assert_close(found, wanted[step], 1e-5)


def test_an_average_changes_no_value():
    batches = Batches(2, steps=STEPS)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES["adagrad"], model), model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            optimizer.step()
        optimizer.flush()
        return copy_of(model)

    without = run(body, 2, servers=2)
    for (_, last), other in zip(
        trained(batches, "adagrad", servers=2), without, strict=True
    ):
        assert_same_bits(last, other)


def test_half_async_in_one_group_is_sync():
    batches = Batches(2, steps=STEPS)
    sync = trained(batches, "adagrad", servers=2)
    half = trained(batches, "adagrad", cpudist.HalfAsync(group=[[0, 1]]), servers=2)
    for (shown, _), (other, _) in zip(sync, half, strict=True):
        for step, found in shown.items():
            assert_same_bits(found, other[step])


def test_async_of_one_trainer_is_torch():
    batches = Batches(1, steps=STEPS)
    wanted = plain_averages("adagrad", batches)
    strategy = cpudist.Async(communicator={"max_merge": 1})
    ((shown, _),) = trained(batches, "adagrad", strategy, every=1, servers=2)
    for step, found in shown.items():
        assert_close(found, wanted[step], 2e-6)


@pytest.mark.parametrize("trainers", [2, 3])
def test_async_averages_over_pushes(trainers):
    """Whole numbers: every push adds one to a weight; order cannot matter."""
    steps = 8

    def body(context):
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = cpudist.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            strategy=cpudist.Async(communicator={"max_merge": 1}),
            average=cpudist.EMA(0.5),
        )
        for _ in range(steps):
            optimizer.zero_grad()
            (-model(torch.ones(1, 1))).sum().backward()
            optimizer.step()
        optimizer.flush()
        cpudist.barrier()
        with optimizer.averaged():
            return float(model.weight)

    average = 0.0
    for push in range(1, steps * trainers + 1):
        average = float(push) if push == 1 else 0.5 * (average + push)
    for found in run(body, trainers):
        assert found == pytest.approx(average, abs=1e-5)


def test_rows_that_were_long_not_touched():
    """A row of the first step, and one of none, 300 updates later."""

    def body(context):
        table = nn.Embedding(8, 2, sparse=True)
        nn.init.ones_(table.weight)
        optimizer = cpudist.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=2**-7),
            table,
            average=cpudist.EMA(0.99),
        )
        plain = nn.Embedding(8, 2, sparse=True, dtype=torch.float64)
        nn.init.ones_(plain.weight)
        inner = torch.optim.SGD(plain.parameters(), lr=2**-7)
        averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        for step in range(300):
            row = {0: 0, 1: 1, 150: 0}.get(step, 2)
            for model, one in ((table, optimizer), (plain, inner)):
                one.zero_grad()
                model(torch.tensor([row])).sum().backward()
                one.step()
            averaged.update_parameters(plain)
        with optimizer.averaged():
            found = table(torch.arange(8)).detach().double()
        return float((found - averaged.module.weight.detach()).abs().max())

    (worst,) = run(body, 1, servers=1)
    assert worst <= 1e-6


def test_what_reads_the_model_inside_sees_averages():
    batches = Batches(1, steps=6)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, average=cpudist.EMA(DECAY)
        )
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            optimizer.step()
        values = copy_of(model)
        every = torch.arange(30)[:, None]
        with optimizer.averaged():
            looked_up = model.bag(every).detach()
            assert torch.equal(model.bag.weight.detach(), looked_up)
            assert torch.equal(model.state_dict()["bag.weight"], looked_up)
            assert not torch.equal(looked_up, values["bag.weight"])
            inside = copy_of(model)
        assert_same_bits(copy_of(model), values)
        assert torch.equal(model.bag(every), values["bag.weight"])
        # What the parameter averages to is what lookups and copies average to.
        with optimizer.averaged():
            assert_same_bits(copy_of(model), inside)

    run(body, 1, servers=2)


def test_averages_travel_exactly_where_values_are_rounded():
    batches = Batches(1, steps=STEPS)
    exact = trained(batches, "sgd", servers=1)
    rounded = trained(
        batches,
        "sgd",
        cpudist.Sync(communicator={"wire_dtype": "fp32", "pull_dtype": "bf16"}),
        servers=1,
    )
    shown, other = exact[0][0], rounded[0][0]
    step = max(shown)
    weight = other[step]["bag.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())
    assert_close(weight_of(other, step), weight_of(shown, step), 0.05)


def weight_of(shown, step):
    return {"bag.weight": shown[step]["bag.weight"]}


def test_prefetched_values_are_no_averages():
    batches = Batches(1, steps=8)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, average=cpudist.EMA(DECAY)
        )
        results = []
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, batches.part(step, 0))
            loss.backward()
            coming = batches.part(min(step + 1, 7), 0)[0]
            optimizer.prefetch({model.bag: coming})
            optimizer.step()
            with optimizer.averaged():
                seen = model.bag(coming).detach()
                optimizer.prefetch({model.bag: coming})  # nothing to do here
                results.append(seen)
        return results

    def without(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, average=cpudist.EMA(DECAY)
        )
        results = []
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            optimizer.step()
            with optimizer.averaged():
                results.append(model.bag(batches.part(min(step + 1, 7), 0)[0]).detach())
        return results

    for one, other in zip(run(body, 1)[0], run(without, 1)[0], strict=True):
        assert torch.equal(one, other)


def test_stored_values_are_their_own_average():
    batches = Batches(1, steps=6)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, average=cpudist.EMA(DECAY)
        )
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            optimizer.step()
        optimizer.flush()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        optimizer.store_model(all_rows=True)
        with optimizer.averaged():
            for value in copy_of(model).values():
                assert torch.equal(value, torch.full_like(value, 0.25))

    run(body, 1, servers=2)
