# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid(dense=Sync()): who leaves and comes back is in both parts from one step on."""

from __future__ import annotations

import pytest
import torch
from sync_cases import run
from turns import Turns
from whole_gradients import Rounds, expected, model_of, push

import torch_cpudist as cpudist

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
        made = 0

        def train():
            nonlocal made
            push(opt, model, rank, made)
            rounds.note(opt.rounds, rank, made)
            made += 1

        train()
        if rank in others:
            for _ in range(RETURNS):
                opt.leave()
                for _ in range(THERE):
                    train()
            turns.over(rank)
        while rank not in others and not all(turns.is_over(one) for one in others):
            train()
        opt.leave()
        context.barrier()
        opt.flush()
        return made, model.table.weight.detach().clone(), model.dense.detach().clone()

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
