# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""No trainer holds state that servers keep, and gets it back as it was."""

from __future__ import annotations

import copy
import resource
from typing import Any

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.optimizer.initial_state import InitialState

ROWS, DIM = 20, 3
SERVED = {
    "sync": cpudist.Sync(),
    "async": cpudist.Async(),
    "half_async": cpudist.HalfAsync(),
    "hybrid_sync": cpudist.Hybrid(dense="sync", sparse="async"),
    "hybrid_allreduce": cpudist.Hybrid(),
    "hybrid_reduce": cpudist.Hybrid(dense="reduce", sparse="sync"),
    "hybrid_local_sgd": cpudist.Hybrid(dense="local_sgd"),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=True)
        self.last = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(ids))


def adagrad(model: nn.Module) -> torch.optim.Adagrad:
    return torch.optim.Adagrad(
        model.parameters(), lr=0.1, initial_accumulator_value=0.25
    )


def train(model: Net, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(step, step + 5)).square().sum().backward()
        optimizer.step()


def assert_same_state(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name
        assert found[name].dtype == value.dtype


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("steps", [0, 2])
def test_state_of_tables_is_away_while_servers_have_it(name: str, steps: int) -> None:
    def body(context: cpudist.Context) -> None:
        model = Net()
        inner = adagrad(model)
        weight = model.table.weight
        before = copy.deepcopy(inner.state[weight])
        opt = cpudist.DistributedOptimizer(inner, model, SERVED[name])
        assert weight not in inner.state
        train(model, opt, steps)
        context.barrier()
        saved = copy.deepcopy(opt.state_dict()["state"][0])
        assert saved["sum"].shape == (ROWS, DIM)
        assert bool((saved["sum"] > 0.25).any()) == (steps > 0)
        opt.load_state_dict(opt.state_dict())
        assert weight not in inner.state
        assert_same_state(opt.state_dict()["state"][0], saved)
        context.barrier()
        opt.flush()
        opt.close()
        assert_same_state(inner.state[weight], before)
        train(model, inner)  # plain torch goes on
        assert inner.state[weight]["step"].item() == 2

    # What averages among trainers needs processes, unless there is one trainer.
    averages = name in ("hybrid_allreduce", "hybrid_reduce", "hybrid_local_sgd")
    run(body, 1 if averages else 2, 1)


def test_dense_state_is_away_too_where_servers_have_it() -> None:
    def body(context: cpudist.Context) -> None:
        model = Net()
        inner = adagrad(model)
        before = {p: copy.deepcopy(state) for p, state in inner.state.items()}
        opt = cpudist.DistributedOptimizer(inner, model)
        assert not inner.state
        train(model, opt)
        context.shutdown()
        for parameter, state in before.items():
            assert_same_state(inner.state[parameter], state)
        assert opt is not None

    run(body, 1, 0)


@pytest.mark.parametrize("then", ["sync", "hybrid_allreduce", "geo"])
def test_wrapping_again_takes_the_servers_state(then: str) -> None:
    strategy = cpudist.Geo() if then == "geo" else SERVED[then]

    def body(context: cpudist.Context) -> None:
        model = Net()
        inner = adagrad(model)
        opt = cpudist.DistributedOptimizer(inner, model)
        train(model, opt)
        expected = copy.deepcopy(opt.state_dict()["state"][0])
        again = cpudist.DistributedOptimizer(inner, model, strategy)
        assert model.table.weight not in inner.state
        found = again.state_dict()["state"][0]
        assert torch.equal(found["sum"], expected["sum"])
        assert found["step"] == expected["step"] == 2
        train(model, again)
        again.close()
        assert model.table.weight in inner.state

    run(body, 1, 1)


def test_state_of_steps_before_wrapping_stays() -> None:
    def body(context: cpudist.Context) -> None:
        model = Net()
        inner = adagrad(model)
        train(model, inner)
        before = copy.deepcopy(inner.state[model.table.weight])
        opt = cpudist.DistributedOptimizer(inner, model)
        assert_same_state(inner.state[model.table.weight], before)
        assert torch.equal(opt.state_dict()["state"][0]["sum"], before["sum"])
        opt.close()
        assert_same_state(inner.state[model.table.weight], before)

    run(body, 1, 1)


def test_what_cannot_be_made_again_is_kept() -> None:
    def body(context: cpudist.Context) -> None:
        model = Net()
        inner = adagrad(model)
        marked = inner.state[model.table.weight]["sum"]
        marked[3] = 7.0
        opt = cpudist.DistributedOptimizer(inner, model)
        opt.close()
        assert inner.state[model.table.weight]["sum"] is marked

    run(body, 1, 0)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def test_zeros_take_no_memory_until_they_are_written() -> None:
    weight = nn.Parameter(torch.zeros(500_000, 32))
    inner = torch.optim.Adagrad([weight])
    size_bytes = weight.nbytes
    taken = InitialState([inner], [weight])
    before = resident_bytes()
    taken.give_back()
    grown = resident_bytes() - before
    assert grown < size_bytes / 4
    state = inner.state[weight]
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[3]]), torch.full((1, 32), 2.0), weight.shape
    )
    inner.step()
    assert state["sum"][3].eq(4.0).all()
    assert not state["sum"][4:].any()


@pytest.mark.parametrize("dim", [1, 2])
def test_state_of_a_table_of_any_key_is_not_read(dim: int) -> None:
    """It stands for more rows than any memory has; of one column, too."""
    weight = cpudist.Embedding(dim).weight
    inner = torch.optim.Adagrad([weight], initial_accumulator_value=0.5)
    taken = InitialState([inner], [weight])
    assert weight not in inner.state
    taken.give_back()
    found = inner.state[weight]["sum"]
    assert found.shape == weight.shape
    assert found[7].tolist() == [0.5] * dim


@pytest.mark.parametrize("pull", ["none", "dense", "all"])
@pytest.mark.parametrize("value", [0.0, 0.25])
def test_shutdown_without_rows_fills_no_memory(pull: str, value: float) -> None:
    def body(context: cpudist.Context) -> None:
        model = Net()
        inner = torch.optim.Adagrad(
            model.parameters(), lr=0.1, initial_accumulator_value=value
        )
        before = {p: copy.deepcopy(state) for p, state in inner.state.items()}
        opt = cpudist.DistributedOptimizer(inner, model)
        train(model, opt)
        context.shutdown(pull)
        for parameter, state in before.items():
            if parameter is model.table.weight and pull != "all" and value:
                assert parameter not in inner.state
            else:
                assert_same_state(inner.state[parameter], state)

    run(body, 1, 1)
