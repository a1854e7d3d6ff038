# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo with an outer optimizer: cuts between two outer steps, and what has moved since.

Trainers of these jobs step in turn and answers are awaited, so that a run has no luck
in it: what goes on from a snapshot ends with the bits of a run that was not disturbed.
"""

from __future__ import annotations

import pytest
import torch
from geo_rounds_cases import (
    OUTER,
    SMALL,
    check_movement,
    geo,
    job,
    killed_before_its_end,
    played,
    trees,
)
from snapshot_cases import settle, until
from snapshot_parity import net, seeing
from sync_cases import ROWS, RULES, assert_same_bits, build, run
from whole_gradients import model_of, push

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

CASES = [
    {},
    {"push_every": 1},
    {"push_every": 4, "remote": True},
    {"trainers": 2, "servers": 2},
    {"trainers": 2, "servers": 0, "push_every": 1, "remote": True},
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda one: " ".join(map(str, one.values()))
)
def test_goes_on_bit_for_bit(case, tmp_path):
    """Values, optimizers here and the outer one on servers, and what has moved."""
    undisturbed = job(tmp_path / "whole", 31, every=5, **case)
    first = job(tmp_path / "two", 18, every=5, **case)
    newest = killed_before_its_end(tmp_path / "two")
    handed_on = Directory(tmp_path / "two").manifest(newest).version.steps
    trained = trees(tmp_path / "two", newest)
    assert [tree["since"]["steps"] for tree in trained] == [1] * len(trained)
    again = job(tmp_path / "two", 31, every=5, **case)
    for (_, _, whole, *_), (*_, stats), (started, _, ended, counted, more) in zip(
        undisturbed, first, again, strict=True
    ):
        assert (started.name, stats["failed"], more["failed"]) == (newest, 0, 0)
        assert 5 <= started.step < 18
        assert_same_bits(ended, whole)
        assert counted == handed_on + 1
    assert again[0][4]["saved"] > 0


def test_with_another_number_of_servers(tmp_path):
    undisturbed = job(tmp_path / "whole", 31, trainers=2, servers=3, every=5)
    job(tmp_path / "two", 18, trainers=2, servers=3, every=5)
    killed_before_its_end(tmp_path / "two")
    again = job(tmp_path / "two", 31, trainers=2, servers=1, every=5)
    for (_, _, whole, *_), (_, _, ended, *_) in zip(undisturbed, again, strict=True):
        assert_same_bits(ended, whole)


def test_snapshots_change_nothing(tmp_path):
    """But where an exchange is always due: then each of them keeps one back a step."""
    saving = job(tmp_path, 30, trainers=2, every=4)
    without = job(None, 30, trainers=2)
    for (_, _, one, *_, stats), (_, _, other, *_) in zip(saving, without, strict=True):
        assert stats["saved"] > 1
        assert_same_bits(one, other)


def test_the_script_saves_at_a_barrier_and_goes_back(tmp_path):
    """To values that all trainers have, with nothing moved since."""
    ended = job(tmp_path, 20, trainers=2, saves=8, back=13)
    other = job(tmp_path / "other", 20, trainers=2, saves=8)
    for (_, _, one, *_), (_, _, two, *_) in zip(ended, other, strict=True):
        assert_same_bits(one, two)
    for tree in trees(tmp_path, "named"):
        assert tree["since"]["steps"] == 0
        assert not tree["moved"]["dense"]
        assert all(len(one["rows"]) == 0 for one in tree["moved"]["tables"].values())
    snapshot = Snapshot(tmp_path / "named")
    assert snapshot.verify() == []
    [first, second] = job(tmp_path, 8, trainers=2)
    for _, begun, *_ in (first, second):
        weight = snapshot.rows("bag.weight", torch.arange(ROWS).numpy())
        rows = torch.from_numpy(weight.columns["weight"].copy())
        assert torch.equal(begun["rows"], rows)
        bias = torch.from_numpy(snapshot.dense("last.bias").copy())
        assert torch.equal(begun["last.bias"], bias)


def test_who_takes_values_alone_begins_without_movement(tmp_path):
    """A warm start; and trainers that the snapshot has not had."""
    job(tmp_path, 18, trainers=2, every=5)
    newest = killed_before_its_end(tmp_path)
    bias = torch.from_numpy(Snapshot(tmp_path / newest).dense("last.bias").copy())
    steps = Directory(tmp_path).manifest(newest).trainers[0].steps
    [first, second, third] = job(tmp_path, steps, trainers=3)
    assert not torch.equal(first[1]["last.bias"], bias)
    assert not torch.equal(second[1]["last.bias"], bias)
    assert torch.equal(third[1]["last.bias"], bias)

    def body(_):
        model = net(remote=False)
        inners = build(RULES["adagrad"], model)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=geo())
        opt.resume(tmp_path / "new")
        opt.load_snapshot(tmp_path / newest, only=["last.*"])
        assert torch.equal(model.last.bias, bias)
        assert opt.trained.exchange.moved_count(0) == 0

    run(body, 1)


def test_another_strategy_says_what_it_does_not_take(tmp_path):
    job(tmp_path, 18, every=5)
    killed_before_its_end(tmp_path)

    def body(_):
        model = net(remote=False)
        inners = build(RULES["adagrad"], model)
        strategy = cpudist.Geo(push_every=3, sharding=SMALL)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=strategy)
        started = opt.resume(tmp_path)
        assert any("had moved since its last exchange" in o for o in started.report)

    run(body, 1)


# -- trainers that nobody keeps together -----------------------------------------------


def test_all_movement_is_in_them_once(tmp_path):
    """But for the last outer steps, which may be of one that ends later alone."""
    for *_, stats in played(tmp_path, [61, 61], 7):
        assert stats["failed"] == 0
    newest = killed_before_its_end(tmp_path)
    assert check_movement(tmp_path) > 0
    for started, _, stats in played(tmp_path, [130, 130], 9):
        assert (started.name, stats["failed"]) == (newest, 0)
    assert killed_before_its_end(tmp_path) != newest
    assert check_movement(tmp_path) > 0


def test_a_barrier_beside_a_save_that_was_asked_for_ends(tmp_path):
    """Each barrier comes when trainer 0 has just asked, and is the end of a round."""
    models = [model_of(remote=False) for _ in range(2)]

    def body(context):
        rank = context.trainer_rank
        inner = torch.optim.SGD(models[rank].parameters(), lr=1.0)
        strategy = geo(push_every=1000, outer=cpudist.Outer(lr=1.0))
        opt = cpudist.DistributedOptimizer(inner, models[rank], strategy=strategy)
        opt.resume(tmp_path, every_steps=4)
        for step in range(16):
            push(opt, models[rank], rank, step)
            if step % 4 == 3:
                cpudist.barrier()
        settle(opt)
        cpudist.barrier()
        until(lambda: opt.stats()["snapshot"]["saved"] > 0)

    run(body, 2, servers=1, variables=seeing(tmp_path))
    # Each is of a barrier: all is on servers.
    for name in Directory(tmp_path).names():
        assert [tree["since"]["steps"] for tree in trees(tmp_path, name)] == [0, 0]
    assert check_movement(tmp_path) > 0


def test_beside_trainers_that_average_in_step_it_is_refused_by_name(tmp_path):
    def body(_):
        model = net(remote=False)
        inners = build(RULES["adagrad"], model)
        rounds = cpudist.Geo(push_every=3, outer=OUTER)
        strategy = cpudist.Hybrid(dense=cpudist.AllReduce(), sparse=rounds)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=strategy)
        with pytest.raises(cpudist.SnapshotError, match=r"Hybrid.*Geo\(outer="):
            opt.resume(tmp_path)

    run(body, 1)
