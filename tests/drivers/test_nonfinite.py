# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Server(nonfinite=)``: one trainer's NaN or infinity poisons nobody."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.launch.context import open_contexts

ROWS, DIM = 50, 4
SKIPPING = {"CPUDIST_SERVER_NONFINITE": "skip"}


class Model(nn.Module):
    """A table and a layer, both of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.head = nn.Linear(DIM, 1, bias=False)
        nn.init.ones_(self.table.weight)
        nn.init.ones_(self.head.weight)

    def forward(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        return self.head(self.table(ids)).sum() * scale


def wrapped(model: nn.Module, strategy: Any) -> cpudist.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.125)
    return cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def step(model: nn.Module, opt: Any, scale: float, ids: list[int]) -> None:
    opt.zero_grad()
    model(torch.tensor(ids), scale).backward()
    opt.step()


def finite(model: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in model.parameters())


def counted() -> int:
    servers = [c.server for c in list(open_contexts) if c.server is not None]
    return sum(server.stats()["nonfinite"] for server in servers)


@pytest.mark.parametrize("coding", ["fp32", "bf16", "int8"])
def test_sync_tells_all_trainers_and_applies_nothing(coding):
    strategy = cpudist.Sync(communicator={"wire_dtype": coding})

    def body(context):
        model = Model()
        opt = wrapped(model, strategy)
        rank = context.trainer_rank
        with pytest.raises(cpudist.NonFiniteGradientError) as caught:
            step(model, opt, math.nan if rank == 1 else 1.0, [rank])
        step(model, opt, 1.0, [rank])  # one server: the next round is whole
        opt.flush()
        context.barrier()
        return str(caught.value), finite(model), model.table.weight[0, 0].item()

    for text, is_finite, value in run(body, 2, servers=1):
        assert text.startswith("trainer 1 pushed a gradient of ")
        assert "that is NaN" in text
        assert text.endswith('; Server(nonfinite="skip") goes on')
        assert is_finite
        assert value == pytest.approx(1 - 0.125 / 2, abs=1e-2)


@pytest.mark.parametrize(
    "strategy", [cpudist.Async(), cpudist.Geo(push_every=1)], ids=["async", "geo"]
)
def test_the_sender_alone_is_told_and_the_others_go_on(strategy):
    told, others = [], []

    def body(context):
        model = Model()
        opt = wrapped(model, strategy)
        if context.trainer_rank == 0:
            for _ in range(3):
                step(model, opt, 1.0, [3])
            opt.flush()
            others.append((finite(model), counted()))
            return

        def train():
            for _ in range(20):
                step(model, opt, math.inf, [7])
            opt.flush()

        # Geo's weights are not skipped: they stay as they are.
        with pytest.raises(cpudist.NonFiniteGradientError, match="trainer 1") as caught:
            train()
        told.append(str(caught.value))

    # What a push failed with is raised by every later call, that at the end too.
    skipping = SKIPPING if strategy.name == "geo" else {}
    with pytest.raises(cpudist.NonFiniteGradientError):
        run(body, 2, servers=1, variables=skipping)
    assert told[0].startswith("trainer 1 pushed a gradient of ")
    assert others[0][0]


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_skipping_trains_as_if_that_batch_had_no_samples(strategy):
    def body(context):
        model = Model()
        opt = wrapped(model, strategy)
        step(model, opt, math.nan if context.trainer_rank == 1 else 1.0, [0])
        opt.flush()
        context.barrier()
        opt.flush()  # under Async dense values are as of a pull
        with torch.no_grad():
            row = model.table(torch.tensor([0]))[0, 0].item()
        return row, model.head.weight[0, 0].item(), counted()

    for row, weight, skipped in run(body, 2, servers=1, variables=SKIPPING):
        assert (row, weight) == (0.875, 0.875)
        assert skipped == 1
