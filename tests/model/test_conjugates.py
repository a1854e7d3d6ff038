# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients behind a conjugate, whose memory torch leaves with the other sign."""

from __future__ import annotations

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core

STEPS = 6
LINKS = {"in_process": None, "network": _core.FaultPlan(seed=5)}


class Complex(nn.Module):
    """A complex gain, and rows that are complex numbers, both conjugated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.real = nn.Embedding(20, 4, sparse=True)
        self.imaginary = nn.Embedding(20, 4, sparse=True)
        self.a = nn.Parameter(torch.tensor(1.0))
        self.b = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The sum of what the rows are, turned by the gain."""
        rows = torch.complex(self.real(ids), self.imaginary(ids)).conj()
        turned = rows * torch.complex(self.a, self.b).conj()
        return (turned - (0.3 - 0.7j)).abs().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A few steps, each on values that have the one before."""
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.tensor([step, step + 1, 19 - step])).backward()
        optimizer.step()
        if isinstance(optimizer, cpudist.DistributedOptimizer):
            optimizer.flush()


@pytest.fixture(scope="module")
def expected():
    model = Complex()
    train(model, torch.optim.SGD(model.parameters(), lr=0.2))
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("strategy", ["sync", "half_async", "async", "geo"])
def test_they_are_those_of_plain_torch(strategy, remote, links, expected):
    plan = LINKS[links]

    def body(context):
        model = Complex()
        assert model(torch.tensor([0])).grad_fn is not None
        if remote:
            cpudist.shard_tables(model, remote=["real", "imaginary"])
        optimizer = cpudist.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.2), model, strategy=strategy
        )
        train(model, optimizer)
        ids = torch.arange(20)
        with torch.no_grad():
            rows = [model.real(ids), model.imaginary(ids)]
        return [*rows, model.a.detach(), model.b.detach()]

    network = None if plan is None else _core.InprocNetwork(plan)
    (found,) = run(body, 1, 1, network=network)
    real, imaginary, a, b = found
    for ours, theirs in zip((a, b, real, imaginary), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_one_that_a_script_has_set_is_read_by_its_values():
    def body(context):
        model = nn.Linear(5, 3)
        optimizer = cpudist.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model
        )
        before = model.weight.detach().clone()
        model.weight.grad = torch._neg_view(torch.ones(3, 5))
        optimizer.step()
        assert torch.equal(model.weight, before + 1.0)

    run(body, 1)


def test_a_parameter_that_is_such_a_view_is_refused():
    def body(context):
        model = nn.Module()
        model.part = nn.Parameter(torch.randn(3, dtype=torch.cfloat).conj().imag)
        assert model.part.is_neg()
        with pytest.raises(cpudist.UnsupportedModelError, match=r"part.*resolve_neg"):
            cpudist.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=1.0), model
            )

    run(body, 1)
