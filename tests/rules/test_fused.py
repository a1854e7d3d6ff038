# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's fused kernels where a script leaves the choice open; buckets; headers."""

from __future__ import annotations

import pytest
import torch
from collective_cases import Dense, batch_of, flat_of, loss_of
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.collective.buckets import LEAST_BYTES, plan
from torch_cpudist.collective.header import MOST_TRAINERS, HeaderForm
from torch_cpudist.collective.rows import Rows
from torch_cpudist.model.placement import DenseParameter


def train(model: Dense, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    for step in range(5):
        optimizer.zero_grad()
        batch = batch_of(step, 0, 4, torch.float32)
        loss_of(model, batch, (0, 1, 2)).backward()
        optimizer.step()
    return flat_of(model)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "AdamW"])
@pytest.mark.parametrize("asked", [None, False])
def test_an_open_choice_is_fused(kind, asked):
    make = getattr(torch.optim, kind)

    def body(context: cpudist.Context) -> None:
        ours = Dense()
        inner = make(ours.parameters(), lr=0.05, fused=asked)
        wrapped = cpudist.DistributedOptimizer(inner, ours, "allreduce")
        found = train(ours, wrapped)
        plain = Dense()
        fused = asked is None
        assert torch.equal(
            found, train(plain, make(plain.parameters(), lr=0.05, fused=fused))
        )
        assert inner.param_groups[0]["fused"] is asked

    run(body, 1)


class Growing(nn.Module):
    """Uses its second layer from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        found = self.first(x)
        return found + self.second(x) if step else found


@pytest.mark.parametrize("strategy", ["localsgd", "allreduce", "reduce", "replicas"])
def test_a_parameter_whose_momentum_begins_later(strategy):
    """torch's fused SGD takes the buffers of all parameters of a group, or none."""

    def steps(model: Growing, learn) -> dict[str, torch.Tensor]:
        for step in range(4):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            learn(x, step)
        return {k: v.clone() for k, v in model.state_dict().items()}

    def sgd(model: Growing) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def stepping(model: Growing, optimizer: torch.optim.Optimizer):
        def learn(x: torch.Tensor, step: int) -> None:
            optimizer.zero_grad()
            model(x, step).square().mean().backward()
            optimizer.step()

        return learn

    def body(context: cpudist.Context) -> None:
        plain, ours = Growing(), Growing()
        expected = steps(plain, stepping(plain, sgd(plain)))
        if strategy == "replicas":
            with cpudist.ReplicaExecutor(
                ours, lambda m, part: m(*part).square().mean(), sgd(ours), 2
            ) as executor:
                found = steps(ours, lambda x, step: executor.run((x, step)))
        else:
            wrapped = cpudist.DistributedOptimizer(sgd(ours), ours, strategy)
            found = steps(ours, stepping(ours, wrapped))
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-6), name

    run(body, 1)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv = nn.Conv2d(3, 6, 3)
        self.out = nn.Linear(6, 1)
        self.out.weight = nn.Parameter(torch.randn(6, 1).t())
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.conv(x).relu().mean((2, 3)))


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "AdamW"])
@pytest.mark.parametrize("strategy", ["localsgd", "allreduce", "reduce"])
def test_parameters_of_any_layout_take_torchs_steps(strategy, kind):
    """The fused kernels go over memory and do not look at strides."""
    options = {"momentum": 0.9} if kind == "SGD" else {}

    def trained(model: Pictures, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        for step in range(4):
            x = torch.randn(4, 3, 6, 6, generator=torch.manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def body(context: cpudist.Context) -> None:
        make = getattr(torch.optim, kind)
        plain, ours = Pictures(), Pictures()
        expected = trained(plain, make(plain.parameters(), lr=0.05, **options))
        inner = make(ours.parameters(), lr=0.05, **options)
        found = trained(ours, cpudist.DistributedOptimizer(inner, ours, strategy))
        assert torch.allclose(found, expected, atol=1e-6)

    run(body, 1)


def entries(*elements: int) -> list[DenseParameter]:
    made = []
    for i, count in enumerate(elements):
        p = nn.Parameter(torch.empty(count))
        made.append(DenseParameter(i, str(i), p, 0, p.dtype, p.shape))
    return made


def test_a_small_model_travels_in_halves():
    half = LEAST_BYTES // 4
    cases = {
        (half, half): [1, 1],
        (half, half // 2, half): [2, 1],  # the last first, until half is in
        (half, half // 2): [2],  # too small
    }
    for sizes, expected in cases.items():
        buckets = plan(entries(*sizes), 1 << 30, halves=True)
        assert [len(bucket.pieces) for bucket in buckets] == expected
    assert len(plan(entries(half, half), 1 << 30)) == 1
    assert [len(b.pieces) for b in plan(entries(3, 3, 3), 24)] == [2, 1]


def summed(told: list[list[float]]) -> list[float]:
    total = torch.zeros(len(told[0]), dtype=torch.float32)
    for one in told:
        total += torch.tensor(one, dtype=torch.float32)
    return total.tolist()


def rows_of(count: int) -> Rows:
    return torch.arange(count), torch.zeros(count, 1)


def test_headers_are_summed_exactly():
    n = 3
    told = []
    weights = [2**53 - 1, 12_345_678_901, 0]
    for rank, weight in enumerate(weights):
        form = HeaderForm(2, 1, n, rank)
        rows = [rows_of(rank * 70_000) if rank else None]
        grads = [None, "there" if rank == 1 else None]
        told.append(
            form.tell(
                samples=weight,
                again=rank == 2,
                number=2**47 + 5,
                dense=grads,
                rows=rows,
            )
        )
        assert len(told[-1]) == form.size
    found = form.read(summed(told))
    assert (found.by_samples, found.again, found.weight) == (3, 1, sum(weights))
    assert found.agreed
    assert found.dense == [1]
    assert found.tables == [0]
    assert found.counts == [[0, 70_000, 140_000]]


def test_a_digest_that_differs_in_one_trainer_is_seen():
    form = HeaderForm(0, 0, 2, 0)
    pair = [
        form.tell(samples=None, again=False, number=number, dense=[], rows=[])
        for number in (77, 78)
    ]
    assert not form.read(summed(pair)).agreed
    assert form.read(summed([pair[0], pair[0]])).agreed
    # The largest summands of as many trainers as there may be.
    assert MOST_TRAINERS * (2**8 - 1) < 2**24
    assert MOST_TRAINERS * (2**4 - 1) ** 2 < 2**24
