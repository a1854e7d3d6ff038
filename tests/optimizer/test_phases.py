# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Seconds of data, forward, backward, push and waiting: every moment is of one."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from async_cases import alone
from patience import PATIENCE_S
from sync_cases import run as run_trainers
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.errors import ClosedError

# Long enough to be told from the rest of a phase, which a busy machine makes longer.
NAP_S = 0.05


class _Slow(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_S)
        return gradient


@dataclass
class Result:
    """What models of others return."""

    scores: dict[str, list[torch.Tensor]]
    loss: None = None


class Slow(nn.Module):
    """Takes its time in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(2, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_S)
        return _Slow.apply(self.score(batch))


class Wrapping(Slow):
    """The same in containers."""

    def forward(self, batch: torch.Tensor) -> Any:
        return Result({"a": [super().forward(batch)]})


def wrapped(model: nn.Module, strategy: str = "sync") -> cpudist.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
    opt.count_phases()
    return opt


def score_of(found: Any) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else found.scores["a"][0]


def test_nothing_is_hooked_unless_asked_for() -> None:
    def body(context: cpudist.Context) -> None:
        model = Slow()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model, strategy="sync")
        model(torch.ones(3, 2)).sum().backward()
        opt.step()
        assert "phase_s" not in opt.stats()
        assert not model._forward_pre_hooks
        opt.count_phases()
        opt.count_phases()
        assert len(model._forward_pre_hooks) == 1
        model(torch.ones(3, 2)).sum().backward()
        opt.step()
        assert opt.stats()["phase_s"]["backward"] >= NAP_S
        opt.close()
        with pytest.raises(ClosedError):
            opt.count_phases()

    alone(body)


@pytest.mark.parametrize("kind", [Slow, Wrapping])
@pytest.mark.parametrize("strategy", ["sync", "async", "geo", "allreduce"])
def test_every_moment_is_of_one_phase(kind: type[Slow], strategy: str) -> None:
    def body(context: cpudist.Context) -> None:
        model = kind()
        opt = wrapped(model, strategy)
        assert not any(opt.stats()["phase_s"].values())
        batch, began = torch.ones(3, 2), time.perf_counter()
        for _ in range(3):
            opt.zero_grad()
            score_of(model(batch)).sum().backward()
            opt.step()
            time.sleep(NAP_S)
        model(batch)
        elapsed_s = time.perf_counter() - began
        seconds = opt.stats()["phase_s"]
        assert sum(seconds.values()) <= elapsed_s
        # The last forward has no end yet.
        for phase in ("data", "forward", "backward"):
            assert seconds[phase] >= 3 * NAP_S, seconds
        assert seconds["push"] > 0
        # All of it but the last forward.
        assert sum(seconds.values()) >= 9 * NAP_S

    alone(body)


def test_forwards_without_gradients_are_the_loops_own() -> None:
    def body(context: cpudist.Context) -> None:
        model = Slow()
        opt = wrapped(model)
        batch = torch.ones(3, 2)
        model(batch).sum().backward()
        opt.step()
        before = opt.stats()["phase_s"]
        with torch.no_grad():
            model(batch)
        opt.step()
        after = opt.stats()["phase_s"]
        assert after["forward"] == before["forward"]
        assert after["backward"] == before["backward"]
        assert after["data"] - before["data"] >= NAP_S

    alone(body)


def test_accumulated_batches_and_two_backwards_of_one_forward() -> None:
    def body(context: cpudist.Context) -> None:
        model = Slow()
        opt = wrapped(model)
        batch = torch.ones(3, 2)
        for _ in range(2):
            loss = model(batch).sum()
            loss.backward(retain_graph=True)
            time.sleep(NAP_S)
            loss.backward()
        opt.step()
        seconds = opt.stats()["phase_s"]
        assert seconds["forward"] >= 2 * NAP_S
        assert seconds["backward"] >= 4 * NAP_S
        assert seconds["data"] >= 2 * NAP_S

    alone(body)


def test_a_backward_that_fails_is_over_with_the_next_step() -> None:
    def body(context: cpudist.Context) -> None:
        model = Slow()
        opt = wrapped(model)
        batch = torch.ones(3, 2)
        loss = model(batch)
        with pytest.raises(RuntimeError, match="scalar"):
            loss.backward()

        def fail(gradient: torch.Tensor) -> None:
            raise ArithmeticError

        score = model(batch)
        handle = model.score.weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            score.sum().backward()
        handle.remove()
        opt.step()
        before = opt.stats()["phase_s"]
        model(batch).sum().backward()
        opt.step()
        after = opt.stats()["phase_s"]
        assert after["forward"] - before["forward"] >= NAP_S
        assert after["backward"] - before["backward"] >= NAP_S

    alone(body)


def test_waiting_for_others_is_of_no_other_phase() -> None:
    may = threading.Event()

    def body(context: cpudist.Context) -> dict[str, float]:
        model = Slow()
        opt = wrapped(model)
        model(torch.ones(3, 2)).sum().backward()
        if context.trainer_rank:
            assert may.wait(PATIENCE_S)
        else:
            threading.Timer(10 * NAP_S, may.set).start()
        opt.step()
        return opt.stats()["phase_s"]

    first, _ = run_trainers(body, 2)
    assert first["wait"] >= 5 * NAP_S
    assert first["backward"] >= NAP_S


def test_a_compiled_model_is_timed() -> None:
    def body(context: cpudist.Context) -> None:
        model = Slow()
        compiled = torch.compile(model, backend="eager")
        opt = wrapped(compiled)
        for _ in range(2):
            opt.zero_grad()
            compiled(torch.ones(3, 2)).sum().backward()
            opt.step()
        seconds = opt.stats()["phase_s"]
        assert seconds["forward"] >= 2 * NAP_S
        assert seconds["backward"] >= 2 * NAP_S

    alone(body)


def test_a_model_that_is_one_graph_is_timed() -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Linear(2, 1)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        opt = wrapped(compiled)
        for _ in range(2):
            opt.zero_grad()
            compiled(torch.ones(3, 2)).sum().backward()
            opt.step()
        seconds = opt.stats()["phase_s"]
        assert seconds["forward"] > 0
        assert seconds["backward"] > 0
        opt.close()
        assert not compiled._forward_pre_hooks
        assert not compiled._forward_hooks

    alone(body)


def test_replicas_compute_at_once() -> None:
    def body(context: cpudist.Context) -> None:
        model = Slow()
        opt = wrapped(model)

        def loss_of(replica: nn.Module, part: torch.Tensor) -> torch.Tensor:
            return replica(part).mean()

        batch, began = torch.ones(4, 2), time.perf_counter()
        with cpudist.ReplicaExecutor(model, loss_of, opt, 2, num_threads=1) as made:
            for _ in range(2):
                made.run(batch)
        elapsed_s = time.perf_counter() - began
        seconds = opt.stats()["phase_s"]
        assert seconds["forward"] + seconds["backward"] >= 4 * NAP_S
        assert seconds["forward"] > 0
        assert seconds["backward"] > 0
        assert sum(seconds.values()) <= elapsed_s

    alone(body)


def test_the_end_and_copies_leave_no_trace() -> None:
    def body(context: cpudist.Context) -> None:
        model = Slow()
        plain = set(vars(model))
        opt = wrapped(model)
        made = copy.deepcopy(model)
        assert vars(made).keys() == plain
        assert not made._forward_pre_hooks
        opt.close()
        assert vars(model).keys() == plain
        assert not model._forward_pre_hooks
        assert not model._forward_hooks

    alone(body)
