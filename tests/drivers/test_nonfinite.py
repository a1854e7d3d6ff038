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


class Counts(nn.Module):
    """A table and a layer whose gradients are the scale, for each id and step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.head = nn.Linear(DIM, 1, bias=False)
        nn.init.zeros_(self.table.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: torch.Tensor, scale: float) -> torch.Tensor:
        return (self.table(ids).sum() + self.head.weight.sum()) * scale


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("max_staleness", [None, 4])
def test_async_loses_that_update_and_goes_on(servers, max_staleness):
    """The sender hears of it once; its other steps, and others', are applied."""
    steps, bad = 12, 3
    strategy = cpudist.Async(max_staleness=max_staleness, communicator={"max_merge": 1})

    def body(context):
        model = Counts()
        opt = wrapped(model, strategy)
        rank, told = context.trainer_rank, []

        def but(call, again):
            try:
                return call()
            except cpudist.NonFiniteGradientError as error:
                told.append(str(error))
                return again()

        for number in range(steps):
            opt.zero_grad()
            scale = math.inf if (rank, number) == (1, bad) else 1.0
            model(torch.tensor([rank]), scale).backward()
            bounded = max_staleness is not None and number == bad
            # Nothing of a step that was told of an earlier one has been sent.
            but(opt.step, (lambda: None) if bounded else opt.step)
        but(opt.flush, opt.flush)
        context.barrier()
        opt.flush()
        with torch.no_grad():
            rows = model.table(torch.tensor([0, 1]))[:, 0].tolist()
        return told, rows, model.head.weight[0, 0].item()

    found = run(body, 2, servers=servers)
    assert [len(told) for told, _, _ in found] == [0, 1]
    assert found[1][0][0].startswith("trainer 1 pushed a gradient of ")
    for _, rows, weight in found:
        assert rows == [-0.125 * steps, -0.125 * (steps - 1)]
        assert weight == -0.125 * (2 * steps - 1)


def test_under_geo_the_sender_ends_and_the_others_go_on():
    told, others = [], []

    def body(context):
        model = Model()
        opt = wrapped(model, cpudist.Geo(push_every=1))
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

        # Its weights are not skipped: they stay as they are.
        with pytest.raises(cpudist.NonFiniteGradientError, match="trainer 1") as caught:
            train()
        told.append(str(caught.value))

    # What an exchange failed with is raised by every later call, that at the end too.
    with pytest.raises(cpudist.NonFiniteGradientError):
        run(body, 2, servers=1, variables=SKIPPING)
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
