# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which rows go again, by hand and beside a dictionary."""

from __future__ import annotations

import time

import pytest
import torch
from open_cases import (
    DIM,
    KEYS,
    assert_as_in,
    dictionary_of,
    keys_trained,
    pushes,
    read,
    step,
    wrap,
)
from patience import PATIENCE_S
from sync_cases import run
from table_cases import alone

import torch_cpudist as cpudist

STEPS = 16
A, B, C = KEYS[3], KEYS[7], KEYS[12]
ONE = cpudist.Constant(1)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("trainers", [1, 2, 3])
@pytest.mark.parametrize(
    "rules",
    [
        {"unseen_steps": 2},
        {"unseen_steps": 3, "min_count": 2},
        {"unseen_steps": 2, "counted": 2},
    ],
    ids=["unseen", "rare", "admitted again"],
)
def test_rows_go_as_in_a_dictionary(rules, trainers, servers):
    told = {name: value for name, value in rules.items() if name != "counted"}
    admission = None
    if "counted" in rules:
        admission = cpudist.CountFilter(rules["counted"], sketch_bytes=1 << 16)
    modules = [
        cpudist.Embedding(
            DIM, eviction=cpudist.Evict(**told), admission=admission, seed=5
        )
        for _ in range(trainers)
    ]
    expected = dictionary_of(modules[0], **rules)
    given = [pushes(STEPS, rank, size=3) for rank in range(trainers)]

    assert_as_in(expected, given, keys_trained(modules, given, servers))
    assert expected.evicted > 0


def test_an_evicted_row_begins_anew_with_its_state():
    module = cpudist.Embedding(DIM, eviction=cpudist.Evict(unseen_steps=2), initial=ONE)

    def body():
        inner = torch.optim.Adagrad(module.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, module)
        found = []
        for key in (A, B, B, A):
            step(opt, module, ([key], [4.0]))
            found.append(read(module, [A])[0, 0].item())
        return found

    first, second, third, fourth = alone(body)
    assert first == second == pytest.approx(0)
    assert third == 1
    # As the first time: the sum of squares has gone, too.
    assert fourth == first


@pytest.mark.parametrize(
    ("order", "left"), [("lru", [B, C]), ("lfu", [A, C])], ids=["lru", "lfu"]
)
def test_those_above_the_bound_go_in_their_order(order, left):
    module = cpudist.Embedding(
        DIM, eviction=cpudist.Evict(max_rows=2, order=order), initial=ONE
    )

    def body():
        opt = wrap(module)
        for keys in ([A], [A], [A], [B], [C]):
            step(opt, module, (keys, [4.0] * len(keys)))
        rows = read(module, [A, B, C])[:, 0]
        return (rows != 1).tolist(), opt.table_stats()["weight"]

    has_row, stats = alone(body)
    assert [key for key, has in zip([A, B, C], has_row, strict=True) if has] == left
    assert (stats["rows"], stats["created"], stats["evicted"]) == (2, 3, 1)


def test_rows_of_an_update_stay_whatever_the_bound():
    module = cpudist.Embedding(DIM, eviction=cpudist.Evict(max_rows=4), initial=ONE)
    many = cpudist.hash_keys(range(50)).tolist()

    def body():
        opt = wrap(module)
        counts = []
        for keys in ([A], many, [A, B]):
            step(opt, module, (keys, [4.0] * len(keys)))
            changed = read(module, keys)[:, 0] != 1
            assert bool(changed.all())
            counts.append(opt.table_stats()["weight"]["rows"])
        return counts

    first, second, third = alone(body)
    assert first == 1
    assert second == 50
    assert third <= 4


def test_a_bounded_table_is_the_same_in_every_run():
    given = [pushes(30, rank, size=4) for rank in range(2)]

    def once():
        modules = [
            cpudist.Embedding(DIM, eviction=cpudist.Evict(max_rows=6), seed=2)
            for _ in range(2)
        ]

        return keys_trained(modules, given, 2)

    first, second = once(), once()
    assert first[0][1]["evicted"] > 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(torch.stack(one[0]), torch.stack(other[0]))
        assert one[1]["rows"] == other[1]["rows"]


def test_shrink_looks_at_all_rows():
    """Many more rows than an update looks at."""
    module = cpudist.Embedding(
        DIM, eviction=cpudist.Evict(unseen_steps=3), initial=cpudist.Constant(0)
    )
    many = cpudist.hash_keys(range(20_000)).tolist()

    def body():
        opt = wrap(module)
        step(opt, module, (many, [4.0] * len(many)))
        for _ in range(3):
            step(opt, module, ([A], [4.0]))
        before = opt.table_stats()["weight"]
        assert before["rows"] + before["evicted"] == len(many) + 1
        assert before["rows"] > 1
        went = opt.shrink()
        after = opt.table_stats()["weight"]
        assert went == {"weight": before["rows"] - 1}
        assert (after["rows"], after["evicted"]) == (1, len(many))
        assert opt.shrink("weight") == {"weight": 0}
        # Memory of rows that went is used again.
        step(opt, module, (many, [4.0] * len(many)))
        assert opt.table_stats()["weight"]["bytes"] <= before["bytes"] * 1.01
        return read(module, many)

    assert torch.equal(alone(body, servers=2), torch.full((20_000, DIM), -1.0))


def test_shrink_by_name():
    model = torch.nn.ModuleDict(
        {
            "kept": cpudist.Embedding(DIM),
            "some": cpudist.Embedding(DIM, eviction=cpudist.Evict(unseen_steps=1)),
        }
    )

    def body():
        opt = wrap(model)
        assert opt.shrink() == {"some.weight": 0}
        for name in ("kept.weight", "none"):
            with pytest.raises(cpudist.InvalidArgumentError, match=r"'some\.weight'"):
                opt.shrink(name)

    alone(body)


def test_rows_go_by_the_clock():
    module = cpudist.Embedding(DIM, eviction=cpudist.Evict(unseen_s=0.05), initial=ONE)

    def body():
        opt = wrap(module)
        step(opt, module, ([A], [4.0]))
        end = time.monotonic() + PATIENCE_S
        while read(module, [A])[0, 0] != 1:
            assert time.monotonic() < end
            step(opt, module, ([B], [4.0]))
        stats = opt.table_stats()["weight"]
        # B's own may have gone between two steps of a slow machine.
        assert stats["evicted"] >= 1

    alone(body)


def test_async_evicts_by_updates():
    module = cpudist.Embedding(DIM, eviction=cpudist.Evict(unseen_steps=2), initial=ONE)

    def body():
        opt = wrap(module, cpudist.Async(communicator={"max_merge": 1}))
        for key in (A, B, B):
            step(opt, module, ([key], [4.0]))
            opt.flush()
        return read(module, [A, B])[:, 0].tolist(), opt.table_stats()["weight"]

    rows, stats = alone(body)
    assert rows == [1.0, -1.0]
    assert (stats["rows"], stats["evicted"]) == (1, 1)


@pytest.mark.parametrize("ahead", [1, 3])
def test_prefetched_rows_that_went_come_anew(ahead):
    """Under Sync lookups give what they give without prefetch."""
    modules = [
        cpudist.Embedding(DIM, eviction=cpudist.Evict(unseen_steps=1), seed=5)
        for _ in range(2)
    ]
    expected = dictionary_of(modules[0], unseen_steps=1)
    given = [pushes(STEPS, rank, size=3, keys=8) for rank in range(2)]

    def body(context):
        module, mine = modules[context.trainer_rank], given[context.trainer_rank]
        opt = wrap(module)
        found = []
        for at, (keys, gradients) in enumerate(mine):
            for later, _ in mine[at + 1 : at + 1 + ahead]:
                opt.prefetch({module: torch.tensor(later)})
            opt.zero_grad()
            rows = module(torch.tensor(keys))
            found.append(rows.detach().clone())
            (rows * torch.tensor(gradients)[:, None].float()).sum().backward()
            opt.step()
        return found

    results = run(body, 2, 2)
    for at, round_of in enumerate(zip(*given, strict=True)):
        for rank, found in enumerate(results):
            assert torch.equal(found[at], expected.read(given[rank][at][0])), at
        expected.update(round_of)
    assert expected.evicted > 0
