# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""HalfAsync: Sync inside a group, Async across groups."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from async_cases import (
    Counting,
    all_seeds,
    model_sum,
    seeds_of,
    wrapped,
)
from async_cases import backward as plain_backward
from half_async_cases import expected_of, halves, step, take_final
from patience import PATIENCE_S
from sync_cases import (
    KEY,
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    loss_of,
    run,
)

import torch_cpudist as cpudist
from torch_cpudist import _core, strategies
from torch_cpudist.launch import environment
from torch_cpudist.machine import host
from torch_cpudist.settings.updates import Trainers

PAIRS = ((0, 1), (2, 3))
STEPS = 12


# -- one group is Sync -----------------------------------------------------------------


def train_samples(rule, strategy, clip):
    """Two servers, three trainers with uneven batches; all models and losses."""
    batches = Batches(3, sizes=lambda step, rank: (step + 2 * rank) % 5, steps=STEPS)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES[rule], model), model, strategy=strategy, clip=clip
        )
        seen = []
        for number in range(STEPS):
            optimizer.zero_grad()
            batch = batches.part(number, context.trainer_rank)
            if len(batch[2]):
                loss = loss_of(model, batch)
                loss.backward()
                seen.append(loss.item())
            optimizer.step(samples=len(batch[2]))
        assert optimizer.rounds == STEPS
        optimizer.leave()
        return take_final(context, optimizer, model), seen

    return run(body, 3, servers=2)


@pytest.mark.parametrize(
    ("rule", "clip"),
    [
        ("sgd_momentum", cpudist.ClipNorm(0.3)),
        ("adagrad", None),
        ("sparse_adam", cpudist.ClipNorm(0.1)),
        ("adagrad", cpudist.ClipTensorNorm(0.05)),
        ("row_wise_adagrad", cpudist.ClipValue(0.05)),
        ("ftrl", None),
    ],
)
def test_one_group_of_all_is_sync_bit_for_bit(rule, clip):
    sync = train_samples(rule, "sync", clip)
    half = train_samples(rule, cpudist.HalfAsync(group=[[2, 0, 1]]), clip)
    for (one, losses), (other, others) in zip(sync, half, strict=True):
        assert_same_bits(one, other)
        assert losses == others


def test_trainers_of_one_host_are_a_group():
    sync = train_samples("adam", "sync", None)
    half = train_samples("adam", "half-async", None)
    for (one, _), (other, _) in zip(sync, half, strict=True):
        assert_same_bits(one, other)


# -- several groups --------------------------------------------------------------------


def test_groups_of_one_apply_every_gradient_once():
    def body(context):
        model = Counting()
        optimizer = wrapped(model, halves([[0], [1], [2]]))
        for seed in seeds_of(context.trainer_rank, STEPS):
            optimizer.zero_grad()
            plain_backward(model, seed)
            optimizer.step()
        optimizer.leave()
        return take_final(context, optimizer, model), optimizer.stats()["staleness"]

    for found, staleness in run(body, 3, servers=2):
        assert_same_bits(found, model_sum(all_seeds(3, STEPS)))
        assert staleness["pushes"] == STEPS


def train_pairs(steps_of, servers, **options):
    """Two groups of two. Final weights, and per trainer its dense values by round."""

    def body(context):
        model = Counting()
        optimizer = wrapped(model, halves(PAIRS))
        rank = context.trainer_rank
        dense = []
        for seed in seeds_of(rank, steps_of[rank]):
            step(optimizer, model, seed)
            dense.append(model.dense.detach().clone())
        optimizer.leave()
        return take_final(context, optimizer, model), dense

    return run(body, 4, servers, **options)


def weights_of(steps_of):
    """What every seed counts: one half, or one when the other member has left."""
    weights = {}
    for pair in PAIRS:
        for rank, other in (pair, pair[::-1]):
            for number, seed in enumerate(seeds_of(rank, steps_of[rank])):
                weights[seed] = 0.5 if number < steps_of[other] else 1.0
    return weights


@pytest.mark.parametrize(
    ("steps_of", "servers"),
    [((8, 8, 8, 8), 0), ((9, 4, 2, 12), 1), ((9, 4, 2, 12), 3), ((0, 5, 7, 7), 2)],
)
def test_sums_are_kept_and_divisors_are_those_of_the_group(steps_of, servers):
    results = train_pairs(steps_of, servers)
    for found, _ in results:
        assert_same_bits(found, expected_of(weights_of(steps_of)))
    for one, other in PAIRS:
        pairs = zip(results[one][1], results[other][1], strict=False)
        assert all(torch.equal(a, b) for a, b in pairs)  # the same of every round


@pytest.mark.parametrize("seed", range(2))
def test_over_lost_and_repeated_frames(seed):
    plan = _core.FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, cut=0.01, seed=seed)
    network = _core.InprocNetwork(plan)
    steps_of = (8, 5, 8, 8)
    links = {"network": network, "variables": KEY if seed == 1 else None}
    for found, _ in train_pairs(steps_of, 2, **links):
        assert_same_bits(found, expected_of(weights_of(steps_of)))
    counts = network.counts()
    assert min(counts.dropped, counts.duplicated, counts.reordered) > 0


def test_a_slow_group_holds_nobody_up():
    arrived = threading.Barrier(3)  # the fast two, and one of the slow
    done = threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, halves(PAIRS))
        rank = context.trainer_rank
        if rank == 2:  # its partner waits for it in a round
            arrived.wait(PATIENCE_S)
            done.set()
        for seed in seeds_of(rank, STEPS):
            step(optimizer, model, seed)
        if rank < 2:
            assert not done.is_set()
            assert optimizer.rounds == STEPS  # all updates so far are theirs
            arrived.wait(PATIENCE_S)
        optimizer.leave()
        return take_final(context, optimizer, model)

    for found in run(body, 4, servers=2):
        assert_same_bits(found, expected_of(weights_of((STEPS,) * 4)))


def test_age_counts_the_updates_of_other_groups_and_a_reply_brings_their_values():
    looked, moved = threading.Event(), threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, halves([[0], [1]]))
        if context.trainer_rank == 1:
            assert looked.wait(PATIENCE_S)
            for seed in range(3):
                step(optimizer, model, seed)
            moved.set()
            return None
        loss = model.table(torch.tensor([1])).sum()
        looked.set()
        assert moved.wait(PATIENCE_S)
        loss.backward()
        optimizer.step()  # has no gradient for the dense vector
        assert optimizer.rounds == 4
        staleness = optimizer.stats()["staleness"]
        assert staleness["steps_max"] == staleness["steps_mean"] == 3
        return model.dense.detach().clone()

    others = expected_of({0: 1.0, 1: 1.0, 2: 1.0})
    assert torch.equal(run(body, 2, servers=2)[0], others["dense"])


def test_leaving_joining_and_barriers_with_groups():
    left = threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, halves(PAIRS))
        rank = context.trainer_rank
        first, alone, again = (seeds_of(rank + 10 * part, 4) for part in range(3))
        for seed in first:
            step(optimizer, model, seed)
        if rank == 1:
            optimizer.leave()
            left.set()
        elif rank == 0:
            assert left.wait(PATIENCE_S)
            for seed in alone:
                step(optimizer, model, seed)
        context.barrier()  # groups are at different rounds
        for seed in again:
            step(optimizer, model, seed)
        return take_final(context, optimizer, model)

    weights = {seed: 0.5 for r in range(4) for seed in seeds_of(r, 4)}
    weights |= dict.fromkeys(seeds_of(10, 4), 1.0)
    weights |= {seed: 0.5 for r in range(4) for seed in seeds_of(20 + r, 4)}
    for found in run(body, 4, servers=2):
        assert_same_bits(found, expected_of(weights))


def test_a_member_that_left_joins_its_group_again():
    stopped, joined = threading.Event(), threading.Event()

    def body(context):
        model = Counting()
        optimizer = wrapped(model, halves([[0, 1], [2]]))
        rank = context.trainer_rank
        mine = seeds_of(rank, 6)
        step(optimizer, model, mine[0])
        if rank == 0:
            optimizer.leave()
            stopped.set()
            assert joined.wait(PATIENCE_S)
        elif rank == 1:
            assert stopped.wait(PATIENCE_S)
            optimizer.leave()
            for seed in mine[1:]:  # the group is empty: it starts at once, alone
                step(optimizer, model, seed)
            joined.set()
        return take_final(context, optimizer, model)

    weights = {0: 0.5, 2000: 1.0, 1000: 0.5}
    weights |= dict.fromkeys(range(1001, 1006), 1.0)
    for found in run(body, 3, servers=2):
        assert_same_bits(found, expected_of(weights))


# -- settings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (3, "found 3, expected a list of lists"),
        ("0,1", "found '0,1', expected a list of lists"),
        ([0, 1], "found 0, expected a list of lists"),
        ([], "a group is empty"),
        ([[0], []], "a group is empty"),
        ([[0, 1], [1]], "trainer 1 is there twice"),
        ([[0, 0]], "trainer 0 is there twice"),
        ([[0, -1]], "-1 is no trainer rank"),
        ([[0, 1.0]], "1.0 is no trainer rank"),
        ([[0, True]], "True is no trainer rank"),
        ([["0"]], "'0' is no trainer rank"),
        ([[2**40]], "1099511627776 is no trainer rank"),
        ([[0], None], "found None, expected a list of lists"),
    ],
)
def test_wrong_groups_are_refused(group, says):
    with pytest.raises(cpudist.ConfigurationError, match=says):
        cpudist.HalfAsync(group=group)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ([[0]], r"trainers are 0 to 1, no group has \[1\]"),
        ([[0, 1, 4]], r"there is no \[4\]"),
    ],
)
def test_groups_must_hold_every_trainer(group, says):
    def body(context):
        wrapped(Counting(), cpudist.HalfAsync(group=group))

    with pytest.raises(cpudist.ConfigurationError, match=says):
        run(body, 2)


@dataclass(frozen=True)
class Other:
    strategy: object
    says: str


@pytest.mark.parametrize(
    "other",
    [
        Other(halves([[0, 1]]), "trainer 1, group"),
        Other(cpudist.Sync(sharding={"min_block_size": 8}), "groups of trainers"),
        Other("async", "update mode"),
    ],
)
def test_trainers_with_other_groups_are_told(other):
    def body(context):
        wrapped(Counting(), (halves([[0], [1]]), other.strategy)[context.trainer_rank])

    with pytest.raises(cpudist.ConfigMismatchError, match=other.says):
        run(body, 2)


def test_groups_are_hosts_by_default():
    made = cpudist.HalfAsync()
    assert made.updates(Trainers(4, ("b", "a", "b", "c"))).groups == (0, 1, 0, 2)
    with pytest.raises(cpudist.ConfigurationError, match="Pass group="):
        made.updates(Trainers(4, None))
    assert halves([[3, 1], [0], [2]]).updates(Trainers(4, None)).groups == (0, 1, 2, 1)
    assert halves([[3, 1], [0, 2]]) == halves(((2, 0), (1, 3)))


@pytest.mark.parametrize("servers", [0, 1])
def test_trainers_meet_with_those_of_their_host(servers, monkeypatch):
    """The odd and the even ranks are hosts; a dedicated server may be on one."""

    def identity():
        return f"host {int(threading.current_thread().name.split()[1]) % 2}"

    monkeypatch.setattr(host, "identity", identity)

    def body(context):
        model = Counting()
        optimizer = wrapped(model, "half_async")
        for seed in seeds_of(context.trainer_rank, 3):
            step(optimizer, model, seed)
        optimizer.leave()
        return take_final(context, optimizer, model), context.trainers().hosts

    expected = expected_of({seed: 0.5 for r in range(4) for seed in seeds_of(r, 3)})
    for found, hosts in run(body, 4, servers):
        assert len(set(hosts)) == 2
        assert_same_bits(found, expected)


def test_the_environment_sets_groups():
    def resolved(text):
        made = environment.parse({"CPUDIST_HALFASYNC_GROUP": text})
        chosen = cpudist.HalfAsync(group=[[0]])
        return strategies.resolve(chosen, made.strategy, made.values, made.server)

    assert resolved("0,1; 2,3").group == PAIRS
    assert resolved("none").group is None
    for text, says in (("0,x", "groups with semicolons"), ("0;0", "there twice")):
        with pytest.raises(cpudist.ConfigurationError, match=f"GROUP='{text}'.*{says}"):
            resolved(text)


@pytest.mark.parametrize("name", ["half_async", "half-async", "HalfAsync"])
def test_names_of_the_strategy(name):
    assert cpudist.strategy(name, group=[[0]]) == cpudist.HalfAsync(group=[[0]])
