# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Several optimizers in rounds: a trainer that has left comes back by a barrier."""

from __future__ import annotations

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist


class Mixed(nn.Module):
    """A table, and dense parameters."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 4, sparse=True)
        self.dense = nn.Linear(4, 1)

    def forward(self, x):
        return self.dense(x + self.table(torch.arange(2)))


def trained(model, opt):
    """One step by a gradient of ones."""
    opt.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    opt.step()


@pytest.mark.parametrize("other", ["sync", "hybrid", "half_async"])
def test_a_step_beside_others_is_refused_and_a_barrier_takes_it_in(other):
    hybrid = cpudist.Hybrid(dense=cpudist.Sync(), sparse=cpudist.Async())
    strategy = {
        "sync": cpudist.Sync(),
        "hybrid": hybrid,
        "half_async": cpudist.HalfAsync(),
    }[other]

    def body(context):
        dense = nn.Linear(4, 1)
        mixed = Mixed()
        opts = [
            cpudist.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=kind
            )
            for model, kind in ((dense, cpudist.Sync()), (mixed, strategy))
        ]

        def step():
            for model, opt in zip((dense, mixed), opts, strict=True):
                trained(model, opt)

        step()
        if context.trainer_rank == 0:
            for opt in opts:
                opt.leave()
            for model, opt in zip((dense, mixed), opts, strict=True):
                before = opt.rounds
                with pytest.raises(cpudist.InvalidArgumentError, match="barrier"):
                    trained(model, opt)
                assert opt.rounds == before
        else:
            step()
            for opt in opts:
                opt.leave()
        context.barrier()
        step()
        for opt in opts:
            opt.leave()
        context.barrier()
        for opt in opts:
            opt.flush()
        return [p.detach().clone() for p in (*dense.parameters(), *mixed.parameters())]

    first, second = run(body, 2, servers=2)
    for one, another in zip(first, second, strict=True):
        assert torch.equal(one, another)


def test_beside_one_that_waits_for_nobody_a_step_comes_back():
    def body(context):
        models = [nn.Linear(4, 1) for _ in range(2)]
        opts = [
            cpudist.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=kind
            )
            for model, kind in zip(models, (cpudist.Sync(), "async"), strict=True)
        ]
        for _ in range(3):
            opts[0].leave()
            for model, opt in zip(models, opts, strict=True):
                trained(model, opt)
        opts[0].leave()
        return opts[0].rounds

    assert min(run(body, 2)) >= 3
