# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ops over all tables of a step: the same bits as an op for each table."""

from __future__ import annotations

import pytest
import torch

from torch_cpudist import _core, ops
from torch_cpudist.errors import InvalidArgumentError, RowOutOfRangeError
from torch_cpudist.ops.tables import TablesStep, TableStep, sum_table_rows

ROWS, DIM, OWNERS = 60, 5, 3
CONFIGS = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.1, "eps": 1e-10},
    "row_wise_adagrad": {"lr": 0.1, "eps": 1e-10},
    "sparse_adam": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    "ftrl": {"lr": 0.1, "l1": 0.01, "l2": 0.1, "lr_power": -0.5, "eps": 1.0},
}
# Elements of each part of a row's state, as torch keeps them.
WIDTHS = {
    "sgd": (),
    "adagrad": (DIM,),
    "row_wise_adagrad": (1,),
    "sparse_adam": (DIM, DIM),
    "ftrl": (DIM, DIM),
}


def draw(seed):
    return torch.Generator().manual_seed(seed)


def piece(n, seed, dtype=torch.float32, strided=False):
    """As a sparse gradient has them: keys [1, n], with duplicates, and rows."""
    keys = torch.randint(ROWS, (1, n), generator=draw(seed))
    rows = torch.randn(n, 2 * DIM, generator=draw(seed + 1), dtype=dtype)
    return keys, rows[:, :DIM] if strided else rows[:, :DIM].contiguous()


def joined(pieces):
    return (
        torch.cat([keys[0] for keys, _ in pieces]),
        torch.cat([rows for _, rows in pieces]),
    )


def table(kind, seed, dtype):
    weight = torch.randn(ROWS, DIM, generator=draw(seed), dtype=dtype)
    states = [
        torch.rand(ROWS, width, generator=draw(seed + 2 + i), dtype=dtype)
        for i, width in enumerate(WIDTHS[kind])
    ]
    return weight, [s[:, 0].clone() if s.shape[1] == 1 else s for s in states]


def one_by_one(weight, states, pieces, config, ascend, part, parts):
    """What an owner does to one table, by the ops for one; returns keys and sums."""
    keys, rows = joined(pieces)
    if parts > 1:
        owner = torch.arange(ops.BUCKET_COUNT) % parts
        order, offsets = ops.partition_keys(keys, owner, 0, parts)
        mine = order[offsets[part] : offsets[part + 1]]
        keys, rows = keys[mine], rows[mine]
    keys, sums = ops.dedupe_segment_sum(keys, rows)
    whole = [state.view(ROWS, -1)[keys] for state in states]
    state = torch.cat([weight.new_empty(len(keys), 0), *whole], dim=1)
    stepped = weight[keys]
    grads = -sums if ascend else sums
    ops.update_rows(stepped, state, torch.arange(len(keys)), grads, config, step=7)
    weight[keys] = stepped
    for kept, new in zip(
        states, state.split([w.shape[1] for w in whole], 1), strict=True
    ):
        kept.view(ROWS, -1)[keys] = new
    return keys, sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strided", [False, True])
def test_sums_are_those_of_each_table_to_the_bit(dtype, strided):
    tables = [
        [piece(n, 10 * n + i, dtype, strided) for i in range(count)]
        for n, count in [(0, 1), (1, 1), (70, 3), (200, 1), (3, 2)]
    ]
    found = sum_table_rows(tables)
    assert len(found) == len(tables)
    for (keys, sums), pieces in zip(found, tables, strict=True):
        expected_keys, expected_sums = ops.dedupe_segment_sum(*joined(pieces))
        assert torch.equal(keys, expected_keys)
        assert torch.equal(sums, expected_sums)
    assert sum_table_rows([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("deal_from", [0, 100, 10_000])
def test_steps_are_those_of_each_table_to_the_bit(deal_from, dtype):
    """Tables of all rules at once, some dealt to three owners and some of one."""
    kinds = [*CONFIGS, *CONFIGS]
    pieces = [
        [piece(40 + 30 * (i % 4), 100 * i + r, dtype, strided=i == 1) for r in range(2)]
        for i in range(len(kinds))
    ]
    configs = [_core.OptimizerConfig(kind, **CONFIGS[kind]) for kind in kinds]
    ours = [table(kind, i, dtype) for i, kind in enumerate(kinds)]
    theirs = [table(kind, i, dtype) for i, kind in enumerate(kinds)]
    versions = [weight._version for weight, _ in ours]
    step = TablesStep(
        pieces,
        [
            TableStep(weight, states, config, 7, ascend=i % 3 == 0, first=i % OWNERS)
            for i, ((weight, states), config) in enumerate(
                zip(ours, configs, strict=True)
            )
        ],
    )
    found = [step.run(owner, OWNERS, deal_from) for owner in range(OWNERS)]
    for i, (weight, states) in enumerate(theirs):
        dealt = sum(rows.shape[0] for _, rows in pieces[i]) >= deal_from
        first = i % OWNERS
        others = [owner for owner in range(OWNERS) if owner != first]
        for part, owner in enumerate([first, *others] if dealt else [first]):
            parts = OWNERS if dealt else 1
            keys, sums = one_by_one(
                weight, states, pieces[i], configs[i], i % 3 == 0, part, parts
            )
            assert torch.equal(found[owner][i][0], keys)
            assert torch.equal(found[owner][i][1], sums)
        if not dealt:
            assert all(len(found[owner][i][0]) == 0 for owner in others)
        assert torch.equal(ours[i][0], weight)
        assert all(map(torch.equal, ours[i][1], states))
        assert ours[i][0]._version > versions[i]


def test_a_key_outside_of_any_table_is_refused_before_a_row_is_written():
    config = _core.OptimizerConfig("sgd", lr=0.1)
    weights = [torch.ones(ROWS, DIM), torch.ones(ROWS, DIM)]
    bad = (torch.tensor([[3, ROWS]]), torch.ones(2, DIM))
    step = TablesStep(
        [[piece(10, 1)], [bad]],
        [TableStep(weight, [], config, 1) for weight in weights],
    )
    with pytest.raises(RowOutOfRangeError, match=rf"keys must be in \[0, {ROWS}\)"):
        step.run(0, 1, 0)
    assert all(bool((weight == 1).all()) for weight in weights)


def test_what_does_not_fit_is_refused_by_name():
    config = _core.OptimizerConfig("adagrad", lr=0.1)
    weight, states = table("adagrad", 1, torch.float32)
    good = piece(4, 1)
    with pytest.raises(InvalidArgumentError, match=r"rows.shape\[1\] must be 5, got 4"):
        TablesStep(
            [[(good[0], good[1][:, :4])]], [TableStep(weight, states, config, 1)]
        )
    with pytest.raises(InvalidArgumentError, match="step must be >= 1, got 0"):
        TablesStep([[good]], [TableStep(weight, states, config, 0)])
    with pytest.raises(TypeError, match=r"rows must be torch\.float32"):
        TablesStep(
            [[piece(4, 1, torch.float64)]], [TableStep(weight, states, config, 1)]
        )
    with pytest.raises(InvalidArgumentError, match=r"len\(steps\) must be 1, got 0"):
        TablesStep([[good]], [])
    with pytest.raises(TypeError, match=r"keys must be torch\.int64"):
        sum_table_rows([[(good[0].int(), good[1])]])
    step = TablesStep([[good]], [TableStep(weight, states, config, 1)])
    with pytest.raises(InvalidArgumentError, match=r"owner must be in \[0, 2\), got 2"):
        step.run(2, 2, 0)
    lacking = TablesStep([[good]], [TableStep(weight, [], config, 1)])
    with pytest.raises(RuntimeError, match="state elements of a row must be 5, got 0"):
        lacking.run(0, 1, 0)


def test_the_ops_themselves_refuse_lists_that_do_not_belong_together():
    raw = torch.ops.torch_cpudist
    keys, rows = piece(4, 1)
    with pytest.raises(RuntimeError, match=r"sum\(pieces\) must be 1, got 2"):
        raw.sum_table_rows([keys], [rows], [2])
    with pytest.raises(RuntimeError, match=r"len\(rows\) must be 1, got 2"):
        raw.sum_table_rows([keys], [rows, rows], [1])
    with pytest.raises(RuntimeError, match="pieces must be 1 or more each"):
        raw.sum_table_rows([keys], [rows], [1, 0])
    kind, flags, hyper = ops.config_arguments(_core.OptimizerConfig("sgd", lr=0.1))
    weight, facts = torch.ones(ROWS, DIM), [kind, flags, 1, 0, 0, 0]
    given = ([keys], [rows], [1], [weight], [])
    with pytest.raises(RuntimeError, match=r"len\(facts\) must be 6, got 5"):
        raw.step_table_rows(*given, facts[:5], hyper, 0, 1, 0)
    with pytest.raises(RuntimeError, match=r"len\(hyper\) must be 13, got 1"):
        raw.step_table_rows(*given, facts, [0.1], 0, 1, 0)
    with pytest.raises(RuntimeError, match="fewer states than facts say"):
        raw.step_table_rows(*given, [kind, flags, 1, 1, 0, 0], hyper, 0, 1, 0)
    with pytest.raises(RuntimeError, match=r"first owner must be in \[0, 1\), got 1"):
        raw.step_table_rows(*given, [kind, flags, 1, 0, 0, 1], hyper, 0, 1, 0)
    assert bool((weight == 1).all())


def test_opcheck():
    pieces = [piece(8, 1), piece(5, 2), piece(0, 3)]
    keys, rows = [k for k, _ in pieces], [r for _, r in pieces]
    raw = torch.ops.torch_cpudist
    torch.library.opcheck(raw.sum_table_rows.default, (keys, rows, [2, 1]))
    config = _core.OptimizerConfig("adagrad", **CONFIGS["adagrad"])
    kind, flags, hyper = ops.config_arguments(config)
    tables = [table("adagrad", i, torch.float32) for i in range(2)]
    weights = [weight for weight, _ in tables]
    states = [state for _, kept in tables for state in kept]
    facts = [kind, flags, 1, 1, 0, 0] * 2
    torch.library.opcheck(
        raw.step_table_rows.default,
        (keys, rows, [2, 1], weights, states, facts, hyper * 2, 0, 1, 0),
        # Not whether it can be traced: torch takes an op that writes to lists and
        # returns one for one that returns what it has written to.
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
