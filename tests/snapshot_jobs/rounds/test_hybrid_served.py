# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid(dense=Sync()): who reads dense parameters, and where they are loaded."""

from __future__ import annotations

import pytest
import torch
from snapshot_cases import settle
from snapshot_parity import SMALL, Job, net, seeing, seen
from sync_cases import RULES, Batches, assert_same_bits, build, loss_of, run
from turns import Turns
from whole_gradients import Pushing, Rounds, expected, model_of, push, saved_values

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

TOGETHER, ALONE = 2, 9  # steps of both trainers, and of the one that stays


def hybrid(sparse):
    small = cpudist.Sharding(min_block_size=2)
    kinds = {"sync": cpudist.Sync, "async": cpudist.Async, "geo": cpudist.Geo}
    return cpudist.Hybrid(dense=cpudist.Sync(), sparse=kinds[sparse](), sharding=small)


def leaving_job(folder, sparse, gone, rounds):
    """One trainer leaves after some steps; the other saves on; what each has then."""
    turns = Turns()
    models = [model_of(remote=False) for _ in range(2)]

    def body(context):
        rank, model = context.trainer_rank, models[context.trainer_rank]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=hybrid(sparse))
        opt.resume(folder, every_steps=3)

        def train(begin, end):
            for step in range(begin, end):
                push(opt, model, rank, step)
                rounds.note(step + 1, rank, step)
                settle(opt)

        train(0, TOGETHER)
        if rank == gone:
            opt.leave()
            turns.over("left")
            turns.wait("saved")
            return None
        turns.wait("left")
        train(TOGETHER, ALONE)
        assert opt.save_snapshot("named") == "named"
        turns.over("saved")
        return opt.stats()["snapshot"]

    return run(body, 2, servers=2, variables=seeing(folder))


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("sparse", ["sync", "async"])
def test_who_stays_reads_and_commits(sparse, gone, tmp_path):
    """Whoever has left: of each trainer all steps are in it, once."""
    rounds = Rounds()
    stats = leaving_job(tmp_path, sparse, gone, rounds)[1 - gone]
    assert (stats["saved"], stats["skipped"], stats["failed"]) == (4, 0, 0)
    names = Directory(tmp_path).names()
    assert len(names) == 4
    for name in names:
        snapshot = Snapshot(tmp_path / name)
        assert snapshot.verify() == []
        steps = [one.steps for one in snapshot.manifest.trainers]
        assert steps[gone] == TOGETHER < steps[1 - gone] <= ALONE
        table, dense, _ = rounds.expected(max(steps))
        if sparse == "async":
            table, _ = expected(steps)
        weight, values = saved_values(snapshot)
        assert torch.equal(weight, table)
        assert torch.equal(values, dense)


def returning_job(folder, sparse, every, rounds, after_step):
    """One leaves and comes back while the other trains and saves; their stats."""
    turns = Turns()
    models = [model_of(remote=False) for _ in range(2)]

    def body(context):
        rank, model = context.trainer_rank, models[context.trainer_rank]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=hybrid(sparse))
        opt.resume(folder, every_steps=every, keep=100)
        trainer = Pushing(opt, model, rank, rounds)

        def train():
            trainer.step()
            after_step(opt)

        train()
        if rank == 0:
            opt.leave()
            turns.over("left")
            turns.wait("saved")
            for _ in range(9):  # is back
                train()
            opt.leave()
            turns.over("left again")
            return opt.stats()["snapshot"]
        turns.wait("left")
        while opt.stats()["snapshot"]["saved"] == 0:
            train()
        turns.over("saved")
        while not turns.is_over("left again"):  # also rounds of both
            train()
        return opt.stats()["snapshot"]

    return run(body, 2, servers=2, variables=seeing(folder))


def check_moments(folder, sparse, rounds):
    """Snapshots have all steps of who was there; returns steps by trainer of each."""
    found = [Snapshot(folder / name) for name in Directory(folder).names()]
    steps = [[one.steps for one in s.manifest.trainers] for s in found]
    for snapshot, counts in zip(found, steps, strict=True):
        assert snapshot.verify() == []
        table, dense, made = rounds.expected(snapshot.manifest.number)
        assert made[:2] == counts
        if sparse != "sync":
            table, _ = expected(counts)
        weight, values = saved_values(snapshot)
        # With Geo movements are added in parts.
        close = {"rtol": 0, "atol": 1e-4 if sparse == "geo" else 0}
        torch.testing.assert_close(weight, table, **close)
        assert torch.equal(values, dense)
    return steps


@pytest.mark.parametrize("sparse", ["sync", "async", "geo"])
def test_who_is_back_reads_again(sparse, tmp_path):
    """The first of those that were in the round, by what servers say of it."""
    rounds = Rounds()
    for stats in returning_job(tmp_path, sparse, 3, rounds, settle):
        assert (stats["skipped"], stats["failed"]) == (0, 0)
    steps = check_moments(tmp_path, sparse, rounds)
    assert min(counts[0] for counts in steps) == 1
    assert max(counts[0] for counts in steps) > 1


@pytest.mark.parametrize("sparse", ["async", "geo"])
def test_a_save_of_every_step_keeps_nobody(sparse, tmp_path, caplog):
    """No trainer is in a round of dense parameters before it has sent its mark."""
    rounds = Rounds()
    stats = returning_job(tmp_path, sparse, 1, rounds, lambda opt: None)
    assert [one["failed"] for one in stats] == [0, 0]
    assert "cut: waited" not in caplog.text  # for long
    check_moments(tmp_path, sparse, rounds)


def ended(folder, steps, servers, every):
    """Two trainers with Adam, up to a step, from where the newest snapshot is."""
    batches = Batches(2, steps=steps)
    models = [net(remote=False) for _ in range(2)]

    def body(context):
        rank, model = context.trainer_rank, models[context.trainer_rank]
        strategy = cpudist.Hybrid(
            dense=cpudist.Sync(), sparse=cpudist.Sync(), sharding=SMALL
        )
        inners = build(RULES["adam"], model)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=strategy)
        started = opt.resume(folder, every_steps=every)
        for step in range(started.step, steps):
            opt.zero_grad()
            loss_of(model, batches.part(step, rank)).backward()
            opt.step()
            settle(opt)
        opt.flush()
        cpudist.barrier()
        return started, seen(opt, model, Job())

    return run(body, 2, servers=servers, variables=seeing(folder))


@pytest.mark.parametrize("servers", [1, 3])
def test_two_trainers_go_on_with_another_number_of_servers(servers, tmp_path):
    whole = ended(tmp_path / "whole", 15, 2, None)
    ended(tmp_path / "two", 10, 2, 4)
    again = ended(tmp_path / "two", 15, servers, None)
    for (_, undisturbed), (started, found) in zip(whole, again, strict=True):
        assert started.step == 8
        assert_same_bits(found, undisturbed)
