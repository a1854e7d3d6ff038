# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lookups of any key: padding, keys without a row, bags, compiled code, copies."""

from __future__ import annotations

import copy

import pytest
import torch
from open_cases import DIM, KEYS, begun, counted, dictionary_of, read, step, wrap
from sync_cases import run
from table_cases import alone, sgd
from torch import nn

import torch_cpudist as cpudist


@pytest.mark.parametrize("bags", [False, True])
def test_unknown_keys_read_zeros_where_that_was_said(bags):
    kind = cpudist.EmbeddingBag if bags else cpudist.Embedding
    module = kind(DIM, unknown="zeros", initial=cpudist.Constant(3))

    def body():
        opt = wrap(module)
        before = read(module)
        ids = torch.tensor(KEYS[:2])
        rows = module(ids, torch.arange(2)) if bags else module(ids)
        assert torch.equal(rows.detach(), torch.zeros(2, DIM))
        rows.sum().backward()
        opt.step()
        return before, read(module)

    before, after = alone(body)
    assert torch.equal(before, torch.zeros(len(KEYS), DIM))
    # The row begins with its initial value all the same.
    assert torch.equal(after[:2], torch.full((2, DIM), 2.75))
    assert torch.equal(after[2:], before[2:])


@pytest.mark.parametrize("padding", [-1, 0, 7, -(2**63), 2**63 - 1])
def test_the_padding_key_reads_zeros_and_never_learns(padding):
    module = cpudist.Embedding(DIM, padding_key=padding)
    bag = cpudist.EmbeddingBag(DIM, mode="max", padding_key=padding)
    model = nn.ModuleList([module, bag])

    def body():
        opt = wrap(model)
        ids = torch.tensor([[padding, 40], [padding, padding]])
        rows, bags = module(ids), bag(ids)
        assert torch.equal(rows[0, 0].detach(), torch.zeros(DIM))
        assert torch.equal(bags[1].detach(), torch.zeros(DIM))
        (rows.sum() + bags.sum()).backward()
        opt.step()
        rows = [counted(f"{name}.weight")["rows"] for name in "01"]
        return read(module, [padding, 40]), rows

    first = torch.from_numpy(begun(module.weight, [40], "0.weight"))[0]
    found, rows = alone(body)
    assert torch.equal(found[0], torch.zeros(DIM))
    assert torch.equal(found[1], first - 0.25)
    assert rows == [1, 1]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_are_torchs(mode, last):
    module = cpudist.EmbeddingBag(DIM, mode=mode, include_last_offset=last)
    plain = nn.EmbeddingBag(len(KEYS), DIM, mode=mode, include_last_offset=last)
    with torch.no_grad():
        plain.weight.copy_(torch.from_numpy(begun(module.weight, KEYS)))
    places = torch.tensor([3, 5, 6, 3, 0])
    offsets = torch.tensor([0, 2, 2, 5] if last else [0, 2, 2])
    weights = torch.tensor([0.5, 2, 1, -1, 4]) if mode == "sum" else None

    def body():
        opt = wrap(module)
        found = module(torch.tensor(KEYS)[places], offsets, weights)
        found.square().sum().backward()
        opt.step()
        return found.detach().clone(), read(module)

    found, rows = alone(body)
    expected = plain(places, offsets, weights)
    expected.square().sum().backward()
    sgd(plain, lr=0.25).step()
    assert torch.equal(found, expected.detach())
    torch.testing.assert_close(rows, plain.weight.detach(), rtol=1e-6, atol=1e-6)


def test_compiled_models_look_up_any_key():
    model = nn.Sequential(cpudist.Embedding(DIM, padding_key=-1), nn.Linear(DIM, 1))
    plain = copy.deepcopy(model)

    def train(made, called):
        opt = wrap(made)
        ids = torch.tensor(KEYS)
        for _ in range(3):
            opt.zero_grad()
            called(ids).square().sum().backward()
            opt.step()
        return read(made[0])

    expected = alone(lambda: train(plain, plain))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(alone(lambda: train(model, compiled)), expected)


def test_copies_of_a_wrapped_one_begin_as_it_began():
    module = cpudist.Embedding(DIM, **{"max_rows": 100})

    def body():
        opt = wrap(module)
        step(opt, module, (KEYS[:3], [1.0, 1.0, 1.0]))
        return copy.deepcopy(module)

    made = alone(body)
    assert type(made) is cpudist.Embedding
    first = torch.from_numpy(begun(module.weight, KEYS))
    assert torch.equal(alone(lambda: (wrap(made), read(made))[1]), first)


def test_accumulated_gradients_of_any_key():
    module = cpudist.Embedding(DIM)
    expected = dictionary_of(module)

    def body():
        opt = wrap(module)
        opt.zero_grad()
        for _ in range(2):
            module(torch.tensor(KEYS[::-1])).sum().backward()
        opt.step()
        return read(module)

    expected.update([(KEYS, [2.0] * len(KEYS))])
    assert torch.equal(alone(body), expected.read())


@pytest.mark.parametrize(
    "strategy", [cpudist.AllReduce, cpudist.Reduce, cpudist.LocalSGD]
)
def test_strategies_that_step_tables_on_trainers_are_refused(strategy):
    module = cpudist.Embedding(DIM)

    def body():
        with pytest.raises(cpudist.UnsupportedModelError, match="weight"):
            wrap(module, strategy())

    alone(body)


def test_trainers_that_disagree_are_told_in_what():
    modules = [
        cpudist.Embedding(DIM, seed=1, unknown=unknown)
        for unknown in ("initial", "zeros")
    ]

    with pytest.raises(cpudist.ConfigMismatchError, match="zeros for unknown keys"):
        run(lambda context: wrap(modules[context.trainer_rank]), 2, 1)
