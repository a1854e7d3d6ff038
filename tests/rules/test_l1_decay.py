# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""L1 decay: a strength times the sign of the weight, on touched rows of tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sync_cases import RULES, Batches, Model, build, copy_of, loss_of, run, split
from torch import nn

import torch_cpudist as cpudist

DECAY = 0.05
STEPS = 12
# What torch runs on sparse gradients, so that it can be compared on tables.
PLAIN = ("sgd", "adagrad", "row_wise_adagrad", "sparse_adam")


def decayed(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["l1_decay"] = DECAY
    return optimizers


def train_plain(
    name: str, batches: Batches, dtype: torch.dtype, decay: float, dense: bool = True
) -> dict[str, torch.Tensor]:
    """torch, with the term added by hand to what has a gradient."""
    model = Model(dtype)
    optimizers = build(RULES[name], model)
    parameters, tables = split(model)
    for step in range(len(batches)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, batches.joined(step)).backward()
        with torch.no_grad():
            for table in tables:
                grad = table.grad.coalesce()
                rows = grad.indices()[0]
                grad.values().add_(table[rows].sign(), alpha=decay)
                table.grad = grad
            for parameter in parameters if dense else ():
                parameter.grad.add_(parameter.sign(), alpha=decay)
        for optimizer in optimizers:
            optimizer.step()
    return copy_of(model)


def trained(
    name: str,
    batches: Batches,
    dtype: torch.dtype,
    strategy: Any,
    servers: int,
    trainers: int,
    dense: bool = True,
) -> dict[str, torch.Tensor]:
    def body(context: cpudist.Context) -> dict[str, torch.Tensor]:
        model = Model(dtype)
        optimizers = build(RULES[name], model)
        decayed(optimizers if dense else optimizers[1:])
        opt = cpudist.DistributedOptimizer(optimizers, model, strategy)
        for step in range(len(batches)):
            opt.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            opt.step()
        context.barrier()
        opt.flush()
        return copy_of(model)

    return run(body, trainers, servers)[0]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    # Tables are float32 and feed the rest, which is float64.
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("servers", [0, 2])
def test_sync_equals_torch_on_the_joined_batch(name: str, servers: int) -> None:
    batches = Batches(2, torch.float64, steps=STEPS)
    expected = train_plain(name, batches, torch.float64, DECAY)
    found = trained(name, batches, torch.float64, cpudist.Sync(), servers, 2)
    assert_equal(found, expected)
    without = train_plain(name, batches, torch.float64, 0.0)
    for key, value in expected.items():
        assert (value - without[key]).abs().max() > 1e-3, key


@pytest.mark.parametrize(
    "strategy", [cpudist.Async(max_staleness=0), cpudist.HalfAsync()], ids=str
)
def test_one_trainer_by_other_strategies_equals_torch(strategy: Any) -> None:
    batches = Batches(1, torch.float64, steps=STEPS)
    expected = train_plain("adagrad", batches, torch.float64, DECAY)
    found = trained("adagrad", batches, torch.float64, strategy, 1, 1)
    assert_equal(found, expected)


def test_geo_steps_tables_so_and_refuses_dense_parameters() -> None:
    batches = Batches(1, torch.float64, steps=STEPS)
    expected = train_plain("adagrad", batches, torch.float64, DECAY, dense=False)
    found = trained("adagrad", batches, torch.float64, cpudist.Geo(), 1, 1, dense=False)
    assert_equal(found, expected)
    with pytest.raises(cpudist.UnsupportedOptimizerError, match="holds dense"):
        trained("adagrad", batches, torch.float64, cpudist.Geo(), 1, 1)


def test_a_float64_parameter_alone_equals_torch_to_its_precision() -> None:
    def body(context: cpudist.Context) -> float:
        model = nn.Linear(3, 2, dtype=torch.float64)
        plain = nn.Linear(3, 2, dtype=torch.float64)
        plain.load_state_dict(model.state_dict())
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        reference = torch.optim.Adam(plain.parameters(), lr=0.1)
        decayed([inner])
        opt = cpudist.DistributedOptimizer(inner, model)
        for step in range(5):
            x = torch.full((2, 3), 1.0 + step, dtype=torch.float64)
            opt.zero_grad()
            reference.zero_grad()
            model(x).square().mean().backward()
            plain(x).square().mean().backward()
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.grad.add_(parameter.sign(), alpha=DECAY)
            opt.step()
            reference.step()
        return max(
            float((a - b).abs().max())
            for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        )

    assert run(body, 1, 0)[0] <= 1e-12


@pytest.mark.parametrize(
    "strategy", [cpudist.AllReduce(), cpudist.Reduce(), cpudist.Hybrid()], ids=str
)
def test_where_torch_steps_it_is_refused(strategy: Any) -> None:
    def body(_: cpudist.Context) -> None:
        model = Model()
        optimizers = decayed(build(RULES["adagrad"], model))
        with pytest.raises(cpudist.UnsupportedOptimizerError):
            cpudist.DistributedOptimizer(optimizers, model, strategy)
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model, cpudist.AllReduce())
        decayed([inner])
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(cpudist.UnsupportedOptimizerError, match=r"l1_decay=0\.05"):
            opt.step()

    run(body, 1, 0)


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf, "much", None])
def test_wrong_strengths_are_refused(wrong: Any) -> None:
    def body(_: cpudist.Context) -> None:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        inner.param_groups[0]["l1_decay"] = wrong
        with pytest.raises(cpudist.InvalidArgumentError, match="l1_decay must be"):
            cpudist.DistributedOptimizer(inner, model)

    run(body, 1, 0)


def test_ftrl_has_its_own() -> None:
    def body(_: cpudist.Context) -> None:
        model = nn.Linear(2, 1)
        inner = cpudist.optim.FTRL(model.parameters(), lr=0.1)
        decayed([inner])
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="its option l1"):
            cpudist.DistributedOptimizer(inner, model)

    run(body, 1, 0)
