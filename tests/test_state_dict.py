# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer state: into plain torch and back, and a run that is resumed."""

from __future__ import annotations

import copy

import pytest
import torch
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
    split,
)
from torch import nn

import torch_cpudist as cpudist

SMALL_BLOCKS = cpudist.Sync(sharding=cpudist.Sharding(min_block_size=8))


def wrap(rule, model):
    return cpudist.DistributedOptimizer(
        build(rule, model), model, strategy=SMALL_BLOCKS
    )


def steps(optimizer, model, batches, rank, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, batches.part(step, rank)).backward()
        optimizer.step()


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_equals_an_uninterrupted_one(name):
    batches = Batches(2, steps=12)

    def whole(context):
        model = Model()
        optimizer = wrap(RULES[name], model)
        steps(optimizer, model, batches, context.trainer_rank, 0, 12)
        optimizer.flush()
        return copy_of(model)

    def first_half(context):
        model = Model()
        optimizer = wrap(RULES[name], model)
        steps(optimizer, model, batches, context.trainer_rank, 0, 6)
        cpudist.barrier()
        optimizer.flush()
        return copy_of(model), copy.deepcopy(optimizer.state_dict())

    saved = run(first_half, 2)[0]

    def second_half(context):
        model = Model()
        model.load_state_dict(saved[0])
        optimizer = wrap(RULES[name], model)
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        steps(optimizer, model, batches, context.trainer_rank, 6, 12)
        optimizer.flush()
        return copy_of(model)

    expected = run(whole, 2)
    for servers in (0, 3):
        for found in run(second_half, 2, servers):
            assert_same_bits(found, expected[0])


@pytest.mark.parametrize("name", ["sgd_momentum", "adagrad", "adam", "sparse_adam"])
def test_state_loads_into_plain_torch_and_back(name):
    batches = Batches(1, steps=8)
    rule = RULES[name]

    def body(context):
        model = Model()
        optimizer = wrap(rule, model)
        steps(optimizer, model, batches, 0, 0, 4)
        optimizer.flush()
        state = optimizer.state_dict()
        plain = copy.deepcopy(model)
        assert type(plain.bag) is torch.nn.EmbeddingBag
        inners = build(rule, plain)
        for inner, one in zip(inners, state["optimizers"], strict=True):
            inner.load_state_dict(one)
        # Back: state that torch holds before wrapping begins on the servers.
        again = cpudist.DistributedOptimizer(inners, plain, strategy=SMALL_BLOCKS)
        steps(optimizer, model, batches, 0, 4, 8)
        steps(again, plain, batches, 0, 4, 8)
        optimizer.flush()
        again.flush()
        dense = [n for n, _ in model.named_parameters() if not n.startswith("bag")]
        for key in dense:
            assert torch.equal(model.state_dict()[key], plain.state_dict()[key]), key

    run(body, 1)


def test_dense_state_continues_in_plain_torch():
    batches = Batches(1, torch.float64, steps=8)

    def body(context):
        model = Model(torch.float64, table=False)
        inner = torch.optim.Adam(model.parameters(), lr=0.02)
        optimizer = cpudist.DistributedOptimizer(inner, model, strategy=SMALL_BLOCKS)
        steps(optimizer, model, batches, 0, 0, 4)
        plain = copy.deepcopy(model)
        torch_adam = torch.optim.Adam(plain.parameters(), lr=0.5)
        torch_adam.load_state_dict(optimizer.state_dict())
        assert torch_adam.param_groups[0]["lr"] == 0.02
        steps(optimizer, model, batches, 0, 4, 8)
        steps(torch_adam, plain, batches, 0, 4, 8)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)

    run(body, 1)


class Rows(nn.Module):
    """Every row is looked up in every step, so that lazy and dense rules agree."""

    def __init__(self, sparse):
        super().__init__()
        values = torch.arange(24.0).cos().reshape(8, 3)
        self.table = nn.Embedding.from_pretrained(values, freeze=False, sparse=sparse)

    def fit(self, optimizer, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            rows = self.table(torch.arange(8).repeat(2))
            (rows.square() * (step + 1)).mean().backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("name", "sparse"),
    [
        ("sgd_momentum", False),
        ("sgd_momentum", True),
        ("adagrad", False),
        ("adagrad", True),
        ("adam", False),
        ("rmsprop_momentum", False),
    ],
)
def test_state_that_torch_saved_itself_continues_on_tables(name, sparse):
    """It knows no updates per row: each counts as many as the whole table."""
    plain = Rows(sparse)
    optimizer = RULES[name].table(list(plain.parameters()))
    plain.fit(optimizer, 0, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy_of(plain)
    plain.fit(optimizer, 3, 6)

    def body(context):
        model = Rows(sparse=True)
        model.load_state_dict(weights)
        optimizer = cpudist.DistributedOptimizer(
            RULES[name].table(list(model.parameters())), model
        )
        optimizer.load_state_dict(saved)
        model.fit(optimizer, 3, 6)
        optimizer.flush()
        return copy_of(model)

    for state in run(body, 2, 2):
        assert largest_difference(state, copy_of(plain)) <= 1e-6


def test_one_trainer_alone_may_ask_for_the_state():
    batches = Batches(2, steps=2)

    def body(context):
        model = Model()
        optimizer = wrap(RULES["adam"], model)
        steps(optimizer, model, batches, context.trainer_rank, 0, 1)
        if context.trainer_rank == 1:
            state = optimizer.state_dict()["optimizers"][0]["state"]
            assert float(state[0]["step"]) == 1.0
        steps(optimizer, model, batches, context.trainer_rank, 1, 2)

    run(body, 2)


def test_state_of_other_optimizers_is_refused():
    def body(context):
        model = Model()
        optimizer = wrap(RULES["adam"], model)
        with pytest.raises(cpudist.InvalidArgumentError, match="expected 2"):
            optimizer.load_state_dict({"optimizers": []})

    run(body, 1)


def test_weights_loaded_after_wrapping_are_refused_until_stored():
    batches = Batches(2, steps=3)
    other = {k: v + 1 for k, v in copy_of(Model()).items()}

    def body(context):
        model = Model()
        optimizer = wrap(RULES["adagrad"], model)
        steps(optimizer, model, batches, context.trainer_rank, 0, 1)
        model.load_state_dict(other)
        with pytest.raises(cpudist.ModelChangedError, match="store_model"):
            loss_of(model, batches.part(1, context.trainer_rank))
        optimizer.store_model()
        optimizer.flush()
        assert_same_bits(copy_of(model), other)
        steps(optimizer, model, batches, context.trainer_rank, 1, 2)

    run(body, 2)


def test_split_finds_the_table():
    dense, tables = split(Model())
    assert len(dense) == 4
    assert len(tables) == 1
