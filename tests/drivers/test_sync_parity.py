# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sync equals one process on the joined batch; ranks are threads of this process."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from patience import PATIENCE_S
from sync_cases import (
    BATCH,
    DIM,
    RULES,
    SLOTS,
    SMALL_BLOCKS,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    largest_difference,
    loss_of,
    reference,
    reference_on,
    run,
    servers_have,
    train,
)

import torch_cpudist as cpudist

COLOCATED = [(1, 0), (2, 0), (3, 0)]
DEDICATED = [(trainers, servers) for trainers in (1, 2, 3) for servers in (1, 2, 3)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("trainers", "servers"), COLOCATED + DEDICATED)
def test_equals_one_process(name, trainers, servers):
    batches = Batches(trainers)
    states = train(RULES[name], batches, servers, strategy=SMALL_BLOCKS)
    for state in states[1:]:
        assert_same_bits(states[0], state)
    expected, allowed = reference(name, trainers)
    assert largest_difference(states[0], expected) <= allowed


@pytest.mark.parametrize("name", [name for name in RULES if name != "sparse_adam"])
def test_dense_float64_equals_one_process(name):
    batches = Batches(3, torch.float64)
    options = {"dtype": torch.float64, "table": False}
    state = train(RULES[name], batches, 2, strategy=SMALL_BLOCKS, **options)[0]
    expected, allowed = reference(name, 3, torch.float64, table=False)
    assert largest_difference(state, expected) <= allowed


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_uneven_and_empty_batches_are_exact_by_samples(name):
    sizes = lambda step, rank: (step + 2 * rank) % 5  # noqa: E731
    batches = Batches(3, sizes=sizes)
    assert any(len(batches.part(s, 1)[2]) == 0 for s in range(len(batches)))
    state = train(RULES[name], batches, 0, by_samples=True)[0]
    expected, allowed = reference_on(RULES[name], batches)
    assert largest_difference(state, expected) <= allowed


def test_a_round_without_samples_changes_nothing():
    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES["adam"], model), model)
        before = copy_of(model)
        batch = Batches(1, steps=1).part(0, 0)
        loss_of(model, batch).backward()
        optimizer.step(samples=0)
        optimizer.flush()
        assert_same_bits(before, model.state_dict())
        loss_of(model, batch).backward()
        optimizer.step(samples=5)
        optimizer.flush()
        assert largest_difference(before, dict(model.state_dict())) > 1e-3

    run(body, 2)


def test_a_step_without_gradient_is_a_zero_gradient_of_weight_one():
    batches = Batches(2, steps=1)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model)
        if context.trainer_rank == 0:
            loss_of(model, batches.part(0, 0)).backward()
        optimizer.step()
        optimizer.flush()
        return copy_of(model)

    model = Model()
    (loss_of(model, batches.part(0, 0)) / 2).backward()
    for optimizer in build(RULES["sgd"], model):
        optimizer.step()
    for state in run(body, 2):
        assert largest_difference(state, dict(model.state_dict())) <= 1e-6


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("servers", [0, 2])
def test_a_trainer_that_finishes_early_leaves(name, servers):
    """Trainer 2 has 20 batches, trainer 1 has 35: the divisor shrinks with each."""
    ends = {0: 50, 1: 35, 2: 20}
    batches = Batches(3, sizes=lambda step, rank: BATCH if step < ends[rank] else 0)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES[name], model), model)
        for step in range(ends[context.trainer_rank]):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            optimizer.step()
        cpudist.barrier()
        optimizer.flush()
        return copy_of(model)

    states = run(body, 3, servers)
    expected, allowed = reference_on(RULES[name], batches)
    for state in states:
        assert_same_bits(states[0], state)
        assert largest_difference(state, expected) <= allowed


def test_all_are_members_again_after_a_barrier():
    """Two epochs of uneven length: the second starts with everybody in one round."""
    batches = Batches(2, steps=12)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model)
        for epoch in range(2):
            own = 6 if context.trainer_rank == 0 else 4
            for step in range(own):
                optimizer.zero_grad()
                batch = batches.part(6 * epoch + step, context.trainer_rank)
                loss_of(model, batch).backward()
                optimizer.step()
            cpudist.barrier()
        optimizer.flush()
        return copy_of(model)

    first = run(body, 2)
    assert_same_bits(first[0], first[1])
    for _ in range(4):
        assert_same_bits(first[0], run(body, 2)[0])


def plain_absence(batches, alone):
    """Plain torch, without trainer 1's part in the rounds ``alone``.

    Its first gradient afterwards is of the values that it had when it joined, before
    the last of these rounds.
    """
    model = Model()
    for step in range(len(batches)):
        if step == alone[-1]:
            joined = copy.deepcopy(model)
        model.zero_grad()
        for rank in (0,) if step in alone else (0, 1):
            source = joined if rank == 1 and step == alone[-1] + 1 else model
            loss = loss_of(source, batches.part(step, rank))
            grads = torch.autograd.grad(loss, list(source.parameters()))
            share = 1.0 if step in alone else 0.5
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                earlier = parameter.grad
                part = grad * share
                parameter.grad = part if earlier is None else earlier + part
        for optimizer in build(RULES["sgd"], model):
            optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("servers", [0, 3])
def test_a_step_after_leave_joins_again(servers, eventually):
    """Trainer 1 misses rounds 4 to 6: one that joins is a member of the next round."""
    alone, steps = (4, 5, 6), 10
    batches = Batches(2, steps=steps)
    left, done = threading.Event(), threading.Event()
    pushes = 2 * alone[0] + len(alone)  # of trainer 0, and one of trainer 1 in advance

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model)

        def train_on(some):
            for step in some:
                optimizer.zero_grad()
                batch = batches.part(step, context.trainer_rank)
                loss_of(model, batch).backward()
                optimizer.step()

        train_on(range(alone[0]))
        if context.trainer_rank == 1:
            optimizer.leave()
            left.set()
            assert done.wait(PATIENCE_S)
            optimizer.flush()
        else:
            assert left.wait(PATIENCE_S)
            train_on(alone[:-1])
            done.set()
            joined = lambda: servers_have(pushes, servers or 2)  # noqa: E731
            eventually(
                joined, PATIENCE_S, "the push of trainer 1, which has joined again"
            )
            train_on(alone[-1:])
        train_on(range(alone[-1] + 1, steps))
        assert optimizer.rounds == steps
        cpudist.barrier()
        optimizer.flush()
        return copy_of(model)

    states = run(body, 2, servers)
    assert_same_bits(states[0], states[1])
    assert largest_difference(states[0], plain_absence(batches, alone)) <= 1e-6


@pytest.mark.parametrize("threads", [1, 3])
def test_two_runs_give_the_same_bits(threads):
    batches = Batches(3)
    variables = {"CPUDIST_SERVER_THREADS": str(threads)}
    options = {"strategy": SMALL_BLOCKS, "variables": variables}
    single = train(RULES["adam"], batches, 2, strategy=SMALL_BLOCKS)[0]
    for _ in range(3):
        assert_same_bits(single, train(RULES["adam"], batches, 2, **options)[0])


@pytest.mark.parametrize("method", ["round_robin", "hash", "balanced"])
@pytest.mark.parametrize("slice_blocks", [True, False])
def test_every_placement_gives_the_same_numbers(method, slice_blocks):
    batches = Batches(2, steps=10)
    sharding = cpudist.Sharding(
        slice=slice_blocks, min_block_size=4, split_method=method
    )
    found = train(RULES["adam"], batches, 3, strategy=cpudist.Sync(sharding=sharding))
    plain = train(RULES["adam"], batches, 1)
    assert_same_bits(found[0], plain[0])


def test_a_trainer_may_evaluate_while_another_waits_in_its_step(eventually):
    ids, dense = torch.arange(3 * SLOTS).view(3, SLOTS), torch.zeros(3, DIM)
    expected = Model()(ids, dense).detach()
    returned = threading.Event()

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model)
        batch = Batches(2, steps=1).part(0, context.trainer_rank)
        loss_of(model, batch).backward()
        if context.trainer_rank == 0:
            eventually(lambda: servers_have(1, 2), PATIENCE_S, "the push of trainer 1")
            with torch.no_grad():
                first = model(ids, dense)
                optimizer.flush()
                again = model(ids, dense)
            assert torch.equal(first, expected)
            assert torch.equal(again, expected)
            assert not returned.is_set()
        optimizer.step()
        returned.set()

    run(body, 2)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (2.5, "found float 2.5"),
        (float("nan"), "found float nan"),
        ("3", "found str '3'"),
        (-1, "must be >= 0"),
        (10**20, r"at most 2\*\*53"),
        (torch.tensor(3.0), "found Tensor"),
    ],
)
def test_samples_are_a_whole_number(samples, says):
    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model)
        loss_of(model, Batches(1, steps=1).part(0, 0)).backward()
        with pytest.raises(cpudist.InvalidArgumentError, match=says):
            optimizer.step(samples=samples)
        assert context.server.stats()["pushes"] == 0
        optimizer.step(samples=torch.tensor(5))
        assert type(optimizer.stats()["samples"]) is int

    run(body, 1)
