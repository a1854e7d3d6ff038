# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables of replicas under plain optimizers: stepped by row, with torch's numbers."""

from __future__ import annotations

import pytest
import torch
from replica_tables import Calls, Tables, batch_of, cut, loss_of
from sync_cases import copy_of, largest_difference
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import optim
from torch_cpudist.replicas import rows

SGD, Adagrad, SparseAdam = torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam
RULES = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-ascending": lambda p: SGD(p, lr=0.1, maximize=True),
    "sgd-tensor-lr": lambda p: SGD(p, lr=torch.tensor(0.1), foreach=False),
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.2, eps=1e-3),
    "adagrad-ascending": lambda p: Adagrad(
        p, lr=0.1, initial_accumulator_value=0.3, maximize=True
    ),
    "sparse-adam": lambda p: SparseAdam(p, lr=0.05, betas=(0.8, 0.95)),
    "sparse-adam-ascending": lambda p: SparseAdam(p, lr=0.05, maximize=True),
    "ftrl": lambda p: optim.FTRL(p, lr=0.2, l1=0.01, l2=0.02),
    "row-wise-adagrad": lambda p: optim.RowWiseAdagrad(p, lr=0.1, weight_decay=0.01),
}
# torch makes these states in the first step, which it therefore does itself.
MADE_BY_STEP = ("sparse-adam", "sparse-adam-ascending", "ftrl", "row-wise-adagrad")


def optimizers_of(rule, model):
    dense = torch.optim.SGD(model.out.parameters(), lr=0.05)
    return [RULES[rule](model.tables()), dense]


def plainly(rule, steps, clip):
    model = Tables()
    optimizers = optimizers_of(rule, model)
    for step in range(steps):
        model.zero_grad()
        loss_of(model, batch_of(step)).backward()
        if clip:
            halve(model)
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def halve(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def halve_sums(model):
    """What clips may take for granted: every key once, in order."""
    grads = [weight.grad for weight in model.tables()]
    assert all(grad is None or grad.is_coalesced() for grad in grads)
    halve(model)


def assert_same_state(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for index, values in theirs.items():
            assert ours[index].keys() == values.keys()
            for name, value in values.items():
                assert type(ours[index][name]) is type(value)
                assert torch.allclose(
                    torch.as_tensor(ours[index][name]),
                    torch.as_tensor(value),
                    rtol=1e-12,
                    atol=1e-12,
                ), name


@pytest.mark.parametrize(
    ("reduce", "dealt", "clip"),
    [
        ("reduce", False, False),
        ("reduce", True, False),
        ("reduce", True, True),
        ("allreduce", False, False),
        ("allreduce", False, True),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_rows_take_the_steps_of_torch(monkeypatch, rule, reduce, dealt, clip):
    monkeypatch.setattr(rows, "DEAL_FROM_ROWS", 1 if dealt else 4096)
    steps, replicas = 7, 3
    calls = Calls(monkeypatch)
    model = Tables()
    optimizers = optimizers_of(rule, model)
    with cpudist.ReplicaExecutor(
        model,
        loss_of,
        optimizers,
        replicas,
        reduce=reduce,
        num_threads=1,
        before_update=(lambda: halve_sums(model)) if clip else None,
    ) as executor:
        for step in range(steps):
            executor.run_parts(cut(batch_of(step), replicas))
    expected, plain = plainly(rule, steps, clip)
    assert largest_difference(copy_of(model), copy_of(expected)) < 1e-12
    assert_same_state(optimizers, plain)
    for ours, theirs in zip(model.tables(), expected.tables(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert torch.allclose(ours.grad.to_dense(), theirs.grad.to_dense())
    # Two of seven steps leave the second table alone.
    by_row = 2 * steps - 2 - (2 if rule in MADE_BY_STEP else 0)
    times = replicas if reduce == "allreduce" or dealt else 1
    assert len(calls.threads) == by_row * times
    assert "MainThread" not in calls.threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_modes_and_any_owners_have_the_same_bits(monkeypatch, dtype):
    def train(reduce, deal_from):
        monkeypatch.setattr(rows, "DEAL_FROM_ROWS", deal_from)
        model = Tables(dtype)
        optimizer = Adagrad(model.parameters(), lr=0.1)
        with cpudist.ReplicaExecutor(
            model, loss_of, optimizer, 3, reduce=reduce, num_threads=1
        ) as executor:
            for step in range(6):
                executor.run_parts(cut(batch_of(step, dtype), 3))
        return copy_of(model)

    expected = train("reduce", 4096)
    for reduce, deal_from in (("reduce", 1), ("allreduce", 1)):
        found = train(reduce, deal_from)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def in_half_precision(model):
    model.bfloat16()
    return SGD(model.parameters(), lr=0.1)


def with_hook(model):
    optimizer = Adagrad(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def of_a_subclass(model):
    return type("Own", (Adagrad,), {})(model.parameters(), lr=0.1)


def with_foreign_state(model):
    """What another release saved, say; torch says what is wrong with it."""
    optimizer = Adagrad(model.parameters(), lr=0.1)
    for weight in model.tables():
        kept = optimizer.state[weight]["sum"]
        optimizer.state[weight]["sum"] = kept.t().contiguous().t()
    return optimizer


@pytest.mark.parametrize(
    "build", [in_half_precision, with_hook, of_a_subclass, with_foreign_state]
)
@pytest.mark.parametrize("reduce", ["reduce", "allreduce"])
def test_what_the_kernels_do_not_take_is_torchs(monkeypatch, build, reduce):
    calls = Calls(monkeypatch)
    model, plain = Tables(), Tables()
    optimizer, reference = build(model), build(plain)
    dtype = model.first.weight.dtype
    with cpudist.ReplicaExecutor(
        model, loss_of, optimizer, 2, reduce=reduce, num_threads=1
    ) as executor:
        for step in range(3):
            batch = batch_of(step, dtype)
            executor.run_parts(cut(batch, 2))
            reference.zero_grad()
            loss_of(plain, batch).backward()
            reference.step()
    assert calls.threads == []
    difference = 0.1 if dtype == torch.bfloat16 else 1e-12
    assert largest_difference(copy_of(model), copy_of(plain)) < difference


@pytest.mark.parametrize("reduce", ["reduce", "allreduce"])
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"foreach": False}])
def test_dense_parameters_take_fused_kernels_where_the_script_leaves_it_open(
    reduce, options
):
    model, plain = nn.Linear(40, 30), nn.Linear(40, 30)
    plain.load_state_dict(model.state_dict())
    optimizer = Adagrad(model.parameters(), lr=0.1, **options)
    choice = options or {"fused": True}
    reference = Adagrad(plain.parameters(), lr=0.1, **choice)
    with cpudist.ReplicaExecutor(
        model,
        lambda net, x: net(x).square().mean(),
        optimizer,
        2,
        reduce=reduce,
        num_threads=1,
    ) as executor:
        for step in range(4):
            executor.run(torch.randn(6, 40, generator=torch.manual_seed(step)))
            for ours, theirs in zip(
                model.parameters(), plain.parameters(), strict=True
            ):
                theirs.grad = ours.grad.clone()
            reference.step()
    assert all(
        torch.equal(value, plain.state_dict()[name])
        for name, value in model.state_dict().items()
    )
    assert optimizer.param_groups[0]["fused"] == options.get("fused")
