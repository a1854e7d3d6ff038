# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which keys get a row: counted by hand, by chance, and as many as there may be."""

from __future__ import annotations

import pytest
import torch
from open_cases import (
    DIM,
    KEYS,
    assert_as_in,
    begun,
    counted,
    dictionary_of,
    keys_trained,
    pushes,
    read,
    rows_by_server,
    step,
    wrap,
)
from sync_cases import run
from table_cases import alone

import torch_cpudist as cpudist

STEPS = 14
A, B, C = KEYS[3], KEYS[7], KEYS[12]


def counting(n: int) -> cpudist.CountFilter:
    return cpudist.CountFilter(n, sketch_bytes=1 << 16)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("trainers", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_nth_push_makes_the_row(n, trainers, servers):
    modules = [
        cpudist.Embedding(DIM, admission=counting(n), seed=5) for _ in range(trainers)
    ]
    expected = dictionary_of(modules[0], counted=n)
    given = [pushes(STEPS, rank) for rank in range(trainers)]

    assert_as_in(expected, given, keys_trained(modules, given, servers))
    assert (expected.filtered > 0) == (n > 1)


def test_a_key_counts_once_per_trainer_and_push():
    """By hand: three in one push are one; two trainers in a round are two."""
    modules = [
        cpudist.Embedding(DIM, admission=counting(2), initial=cpudist.Constant(1))
        for _ in range(2)
    ]
    batches = [
        # Of rank 0 and rank 1. A: one push, and dropped. B: the second one makes it.
        (([A, A, A], [8.0, 8.0, 8.0]), ([], [])),
        (([B, C], [8.0, 8.0]), ([B], [16.0])),
        # A's second push.
        (([], []), ([A], [8.0])),
    ]

    def body(context):
        rank = context.trainer_rank
        opt = wrap(modules[rank])
        found = []
        for round_of in batches:
            step(opt, modules[rank], round_of[rank])
            found.append(read(modules[rank], [A, B, C])[:, 0].tolist())
        return found, counted()

    for found, stats in run(body, 2, 2):
        assert found == [
            [1.0, 1.0, 1.0],
            [1.0, 1.0 - 0.25 * 16 / 2, 1.0],
            [1.0 - 0.25 * 8 / 2, -1.0, 1.0],
        ]
        # A's first, B's of rank 0, and C's.
        assert (stats["rows"], stats["created"], stats["filtered"]) == (2, 2, 3)


def test_a_push_without_weight_counts_for_nothing():
    modules = [
        cpudist.Embedding(DIM, admission=counting(2), initial=cpudist.Constant(1))
        for _ in range(2)
    ]
    # Samples of rank 0 and rank 1, both of which name A.
    given = [(4, 0), (0, 4), (0, 0), (4, 0)]

    def body(context):
        rank = context.trainer_rank
        module = modules[rank]
        opt = wrap(module)
        found = []
        for samples in given:
            opt.zero_grad()
            (8 * module(torch.tensor([A]))).sum().backward()
            opt.step(samples=samples[rank])
            found.append((float(read(module, [A])[0, 0]), counted()["filtered"]))
        return found

    # The second push of those that count makes the row, and is all of its round.
    assert run(body, 2, 2) == [[(1.0, 1), (-1.0, 1), (-1.0, 1), (-3.0, 1)]] * 2


def test_async_pushes_count_too():
    module = cpudist.Embedding(DIM, admission=counting(3), initial=cpudist.Constant(0))

    def body():
        opt = wrap(module, cpudist.Async(communicator={"max_merge": 1}))
        found = []
        for _ in range(4):
            step(opt, module, ([A], [4.0]))
            opt.flush()
            found.append(float(read(module, [A])[0, 0]))
        return found, counted()

    found, stats = alone(body)
    assert found == [0.0, 0.0, -1.0, -2.0]
    assert (stats["created"], stats["filtered"]) == (1, 2)


def test_chance_is_decided_once_for_each_key():
    def made(p, seed):
        return cpudist.Embedding(
            DIM,
            admission=cpudist.Probability(p),
            initial=cpudist.Constant(1),
            seed=seed,
        )

    keys = cpudist.hash_keys(range(4000))

    def admitted(module, servers, strategy=None):
        def body(context):
            opt = wrap(module, strategy)
            for _ in range(3):
                opt.zero_grad()
                module(keys).sum().backward()
                opt.step()
            opt.flush()
            changed = read(module, keys.tolist())[:, 0] != 1
            return changed, counted()

        return run(body, 1, servers)[0]

    first, stats = admitted(made(0.3, 7), 1)
    count = int(first.sum())
    # 4000 draws of 0.3: five standard deviations are 145.
    assert abs(count - 1200) < 145
    assert (stats["rows"], stats["created"]) == (count, count)
    assert stats["filtered"] == 3 * (4000 - count)
    again, _ = admitted(made(0.3, 7), 3, cpudist.Async())
    assert torch.equal(again, first)
    other, _ = admitted(made(0.3, 8), 1)
    assert not torch.equal(other, first)
    every, _ = admitted(made(1, 7), 1)
    assert bool(every.all())


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_full_table_refuses_the_update_and_changes_nothing(trainers):
    modules = [cpudist.Embedding(DIM, max_rows=8, seed=1) for _ in range(trainers)]
    many = cpudist.hash_keys(range(100)).tolist()

    def body(context):
        module = modules[context.trainer_rank]
        opt = wrap(module)
        step(opt, module, ([A, B], [8.0, 8.0]))
        before = read(module)
        keys = many if context.trainer_rank == 0 else [A]
        with pytest.raises(cpudist.TableFullError, match=r"max_rows"):
            step(opt, module, (keys, [8.0] * len(keys)))
        after = read(module)
        step(opt, module, ([A], [8.0]))  # rows that are there train on
        return before, after

    for before, after in run(body, trainers, 1):
        assert torch.equal(before, after)


def test_each_server_has_its_share_of_the_bound():
    module = cpudist.Embedding(DIM, max_rows=3000)
    keys = cpudist.hash_keys(range(9000)).tolist()

    def push_until_full(opt):
        for at in range(2400, len(keys), 60):
            step(opt, module, (keys[at : at + 60], [1.0] * 60))

    def body():
        opt = wrap(module)
        step(opt, module, (keys[:2400], [1.0] * 2400))
        assert counted()["rows"] == 2400
        with pytest.raises(cpudist.TableFullError, match="more than its share, 100"):
            push_until_full(opt)
        return rows_by_server()

    found = alone(body, servers=3)
    # A third, as buckets are dealt, rounded up: one is full, and none has more.
    assert len(found) == 3
    assert max(found) <= 1001
    assert max(found) > 1001 - 60
    assert sum(found) > 2400


def test_all_trainers_are_told_by_a_server_that_is_full():
    """Whatever the others have applied: the same error, at the same step."""
    modules = [cpudist.Embedding(DIM, max_rows=30, seed=1) for _ in range(3)]
    many = cpudist.hash_keys(range(600)).tolist()

    def body(context):
        rank = context.trainer_rank
        module = modules[rank]
        opt = wrap(module)
        for number in range(100):
            # Of trainer 2 nothing is new.
            keys = [many[2 * number + rank]] if rank < 2 else []
            try:
                step(opt, module, (keys, [8.0] * len(keys)))
            except cpudist.TableFullError as error:
                return number, str(error)
        return None

    first, *others = run(body, 3, 3)
    assert first is not None
    assert others == [first, first]


def test_a_full_table_of_one_of_two_servers_ends_the_run():
    """Another has applied what it refuses: trainers do not go on with two models."""
    module = cpudist.Embedding(DIM, max_rows=20, seed=1)
    many = cpudist.hash_keys(range(200)).tolist()

    def body():
        opt = wrap(module)
        step(opt, module, (many[:4], [8.0] * 4))
        owned = None
        for key in many:  # until one server is full
            try:
                step(opt, module, ([key], [8.0]))
            except cpudist.TableFullError:
                owned = key
                break
        assert owned is not None
        assert counted()["rows"] <= 20
        with pytest.raises(cpudist.ClosedError, match="hold one model"):
            step(opt, module, (many[:4], [8.0] * 4))

    alone(body, servers=2)


def test_what_is_not_admitted_reads_as_it_began():
    module = cpudist.Embedding(DIM, admission=counting(3))

    def body():
        opt = wrap(module)
        step(opt, module, (KEYS, [4.0] * len(KEYS)))
        return read(module), counted()

    found, stats = alone(body)
    assert torch.equal(found, torch.from_numpy(begun(module.weight, KEYS)))
    assert (stats["rows"], stats["filtered"]) == (0, len(KEYS))
