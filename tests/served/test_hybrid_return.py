# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid(dense=Sync()): who leaves and comes back is in both parts from one step on."""

from __future__ import annotations

import threading

import pytest
import torch
from interrupts import interrupted, waiting_in_a_call
from patience import PATIENCE_S
from sync_cases import ONE_THREAD, run
from turns import Turns
from whole_gradients import Pushing, Rounds, expected, model_of, push

import torch_cpudist as cpudist
from torch_cpudist import _core

RETURNS, THERE = 3, 3  # of each trainer but the last, and its steps after each


def hybrid(sparse):
    small = cpudist.Sharding(min_block_size=2)
    return cpudist.Hybrid(dense=cpudist.Sync(), sparse=sparse, sharding=small)


def returning_job(sparse, trainers, servers, rounds):
    """All but the last trainer leave and return; what each ends with."""
    models = [model_of(remote=False) for _ in range(trainers)]
    turns = Turns()
    others = range(trainers - 1)

    def body(context):
        rank, model = context.trainer_rank, models[context.trainer_rank]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=hybrid(sparse))
        trainer = Pushing(opt, model, rank, rounds)
        trainer.step()
        if rank in others:
            for _ in range(RETURNS):
                opt.leave()
                for _ in range(THERE):
                    trainer.step()
            turns.over(rank)
        while rank not in others and not all(turns.is_over(one) for one in others):
            trainer.step()
        opt.leave()
        context.barrier()
        opt.flush()
        return (
            trainer.made,
            model.table.weight.detach().clone(),
            model.dense.detach().clone(),
        )

    return run(body, trainers, servers=servers)


@pytest.mark.parametrize(("trainers", "servers"), [(2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("sparse", ["sync", "async", "geo"])
def test_who_comes_back_is_in_both_parts_from_one_step_on(sparse, trainers, servers):
    made = {"sync": cpudist.Sync(), "async": cpudist.Async(), "geo": cpudist.Geo()}
    rounds = Rounds()
    found = returning_job(made[sparse], trainers, servers, rounds)
    last = max(rounds.made)
    table, dense, _ = rounds.expected(last)
    assert sum(len(ranks) > 1 for ranks in rounds.made.values()) > RETURNS * THERE
    counts = [one[0] for one in found]
    for _, weight, values in found:
        torch.testing.assert_close(values, dense, rtol=0, atol=1e-4)
        if sparse == "sync":  # its rounds are of the same trainers
            torch.testing.assert_close(weight, table, rtol=0, atol=1e-4)
        else:  # with Geo movements are added in parts
            close = {"rtol": 0, "atol": 1e-4 if sparse == "geo" else 0}
            torch.testing.assert_close(weight, expected(counts)[0], **close)


def test_with_a_bound_on_staleness_join_comes_first():
    sparse = cpudist.Async(max_staleness=8)
    models = [model_of(remote=False) for _ in range(2)]

    def body(context):
        rank, model = context.trainer_rank, models[context.trainer_rank]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=hybrid(sparse))
        push(opt, model, rank, 0)
        opt.leave()
        if rank == 0:
            with pytest.raises(cpudist.Error, match="join"):
                push(opt, model, rank, 1)
            opt.join()
            push(opt, model, rank, 1)
            opt.leave()
        context.barrier()
        opt.flush()
        return model.table.weight.detach().clone()

    for weight in run(body, 2, servers=2):
        assert torch.equal(weight, expected([2, 1])[0])


@pytest.mark.parametrize("then", ["step", "leave"])
@pytest.mark.parametrize("sparse", ["sync", "async", "geo"])
def test_an_interrupt_while_it_comes_back(sparse, then):
    made = {"sync": cpudist.Sync(), "async": cpudist.Async(), "geo": cpudist.Geo()}
    shared = {
        "world_size": 2,
        "store": torch.distributed.HashStore(),
        "network": _core.InprocNetwork(),
        "variables": ONE_THREAD,
    }
    turns, rounds, found = Turns(), Rounds(), {}
    models = [model_of(remote=False) for _ in range(2)]

    def body(rank):
        context, model = cpudist.init(rank=rank, **shared), models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=hybrid(made[sparse]))
        trainer = Pushing(opt, model, rank, rounds)
        trainer.step()
        if rank == 0:
            opt.leave()
            with pytest.raises(KeyboardInterrupt), interrupted(waiting_in_a_call()):
                push(opt, model, rank, 1)
            turns.over("interrupted")
            if then == "step":  # with the gradients that are there
                trainer.step(again=True)
        else:
            turns.wait("interrupted")
        if rank == 1 or then == "step":
            for _ in range(THERE):
                trainer.step()
        opt.leave()
        context.barrier()
        opt.flush()
        found[rank] = trainer.made, model.table.weight.detach().clone()
        found["dense"] = model.dense.detach().clone()
        context.shutdown()

    other = threading.Thread(target=body, args=(1,), daemon=True)
    other.start()
    body(0)
    other.join(PATIENCE_S)
    table, dense, _ = rounds.expected(max(rounds.made))
    if sparse != "sync":
        table, _ = expected([found[0][0], found[1][0]])
    torch.testing.assert_close(found["dense"], dense, rtol=0, atol=1e-4)
    for rank in range(2):
        torch.testing.assert_close(found[rank][1], table, rtol=0, atol=1e-4)


def test_a_round_that_fails_while_a_trainer_comes_back_parts_nobody():
    """It counts for nothing, in the other part too."""
    turns, rounds = Turns(), Rounds()
    models = [model_of(remote=False) for _ in range(2)]

    def body(context):
        rank, model = context.trainer_rank, models[context.trainer_rank]
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        opt = cpudist.DistributedOptimizer(
            inner, model, strategy=hybrid(cpudist.Sync())
        )
        push(opt, model, rank, 0)
        if rank == 0:
            opt.leave()
            turns.over("left")
        else:
            turns.wait("left")
            push(opt, model, rank, 1)
            opt.zero_grad()
            (
                model.table(torch.arange(2)).sum() + model.dense.sum() * torch.inf
            ).backward()
            # The other one is about to come back, or does as soon as it is its turn.
            turns.over("fails")
            with pytest.raises(cpudist.NonFiniteGradientError):
                opt.step()
        trainer = Pushing(opt, model, rank, rounds, made=2)
        if rank == 0:
            turns.wait("fails")
            for _ in range(THERE):
                trainer.step()
            turns.over("done")
        while not turns.is_over("done"):
            trainer.step()
        opt.leave()
        context.barrier()

    run(body, 2, servers=2)
    assert sum(len(ranks) == 2 for ranks in rounds.made.values()) == THERE
