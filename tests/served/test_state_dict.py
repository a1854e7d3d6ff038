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


@pytest.mark.parametrize("name", RULES)
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
        assert_same_bits(copy_of(model), copy_of(plain))

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


LAZY_AND_DENSE = pytest.mark.parametrize(
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


@LAZY_AND_DENSE
def test_state_of_tables_continues_in_plain_torch(name, sparse):
    def body(context):
        model = Rows(sparse=True)
        inner = RULES[name].table(list(model.parameters()))
        optimizer = cpudist.DistributedOptimizer(inner, model)
        model.fit(optimizer, 0, 3)
        optimizer.flush()
        weights, saved = copy_of(model), copy.deepcopy(optimizer.state_dict())
        model.fit(optimizer, 3, 6)
        optimizer.flush()
        return weights, saved, copy_of(model)

    weights, saved, expected = run(body, 2, 2)[0]
    plain = Rows(sparse)
    plain.load_state_dict(weights)
    optimizer = RULES[name].table(list(plain.parameters()))
    optimizer.load_state_dict(saved)
    plain.fit(optimizer, 3, 6)
    assert largest_difference(copy_of(plain), expected) <= 1e-6
    assert largest_difference(weights, expected) > 1e-3


@LAZY_AND_DENSE
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
        optimizer.store_model(all_rows=True)
        optimizer.flush()
        assert_same_bits(copy_of(model), other)
        steps(optimizer, model, batches, context.trainer_rank, 1, 2)

    run(body, 2)


def learn(model, optimizer, *rows):
    """One step of SGD(lr=1) that takes 1 from every element of these rows."""
    optimizer.zero_grad()
    model(torch.tensor(rows)).sum().backward()
    optimizer.step()


def table_of_zeros():
    model = nn.Embedding(6, 2, sparse=True)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def test_a_written_row_does_not_undo_the_other_rows():
    """Rows that a step changed are stale here until a lookup or flush."""

    def body(context):
        model, inner = table_of_zeros()
        optimizer = cpudist.DistributedOptimizer(inner, model)
        learn(model, optimizer, 1, 2)
        with torch.no_grad():
            model.weight[0] = 9.0
        saved = optimizer.state_dict()
        with pytest.raises(cpudist.ModelChangedError, match=r"flush\(\) before"):
            optimizer.store_model()
        with pytest.raises(cpudist.ModelChangedError, match=r"flush\(\) before"):
            optimizer.load_state_dict(saved)

    run(body, 1)


def test_a_row_written_after_a_flush_is_stored_beside_what_was_learned():
    def body(context):
        model, inner = table_of_zeros()
        optimizer = cpudist.DistributedOptimizer(inner, model)
        learn(model, optimizer, 1, 2)
        optimizer.flush()
        with torch.no_grad():
            model.weight[0] = 9.0
        optimizer.store_model()
        learn(model, optimizer, 1)
        optimizer.flush()
        return model.weight[:, 0].tolist()

    assert run(body, 2) == [[9.0, -2.0, -1.0, 0.0, 0.0, 0.0]] * 2


def test_a_refused_store_can_be_repeated_while_others_wait():
    def body(context):
        model, inner = table_of_zeros()
        optimizer = cpudist.DistributedOptimizer(inner, model)
        learn(model, optimizer, 1, 2)
        with torch.no_grad():
            model.weight.fill_(5.0)
        if context.trainer_rank == 0:
            with pytest.raises(cpudist.ModelChangedError, match="all_rows=True"):
                optimizer.store_model()
        optimizer.store_model(all_rows=True)
        optimizer.flush()
        return model.weight.eq(5.0).all().item()

    assert run(body, 2) == [True, True]


def test_wrapping_again_does_not_undo_rows_either():
    def body(context):
        model, inner = table_of_zeros()
        optimizer = cpudist.DistributedOptimizer(inner, model)
        learn(model, optimizer, 1, 2)
        with torch.no_grad():
            model.weight[0] = 9.0
        with pytest.raises(cpudist.ModelChangedError, match=r"'weight'.*flush"):
            cpudist.DistributedOptimizer(inner, model)
        optimizer.flush(overwrite=True)
        assert model.weight[1:3].eq(-1.0).all()

    run(body, 1)


def test_state_of_steps_by_others_before_a_store_is_kept():
    """Trainer 0 waits in store_model() while trainer 1 goes on without it."""

    def body(context):
        model, inner = table_of_zeros()
        inner = torch.optim.Adagrad(model.parameters(), lr=1.0)
        optimizer = cpudist.DistributedOptimizer(inner, model)
        learn(model, optimizer, 1)
        if context.trainer_rank == 1:
            learn(model, optimizer, 1)
        optimizer.store_model()
        return optimizer.state_dict()["state"][0]["sum"][1, 0].item()

    assert run(body, 2) == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torchs_default_dtype_has_no_say(dtype):
    def body(context):
        model = Model()
        optimizer = wrap(RULES["adam"], model)
        steps(optimizer, model, Batches(1, steps=4), 0, 0, 4)
        expected = optimizer.state_dict()["optimizers"]
        torch.set_default_dtype(dtype)
        try:
            found = optimizer.state_dict()["optimizers"]
            optimizer.load_state_dict({"optimizers": found})
            again = optimizer.state_dict()["optimizers"]
        finally:
            torch.set_default_dtype(torch.float32)
        for states in (found, again):
            assert_same_state(states, expected)

    run(body, 1)


def assert_same_state(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        for i, state in theirs["state"].items():
            assert ours["state"][i].keys() == state.keys()
            for key, value in state.items():
                assert ours["state"][i][key].dtype == value.dtype, key
                assert torch.equal(ours["state"][i][key], value), key


def test_split_finds_the_table():
    dense, tables = split(Model())
    assert len(dense) == 4
    assert len(tables) == 1
