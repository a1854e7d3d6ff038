# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``cpudist.advise`` on runs that lack something on purpose, and on one that does not.

What is too slow is so by a multiple of what the rest of a step takes here: advice goes
by shares of a time, and these are the same on a slow or busy machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE_S
from sync_cases import ONE_THREAD, Batches, Model, loss_of, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.advice.advising import LEAST_STEPS
from torch_cpudist.machine import topology
from torch_cpudist.testing import ProcessRanks

TRAINERS = 3
ELEMENTS = 1 << 20
COUNTED: Any = {"print_every": None, "count_samples": lambda batch: 1}
DONE = "ADVICE_TEST_DONE"
# So much longer than the rest of a step whatever holds it up takes.
TIMES = 4
Find = Callable[[], list[cpudist.Advice]]


def wrapped(strategy: Any = "sync") -> tuple[Model, cpudist.DistributedOptimizer]:
    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def step_of(
    model: Model, opt: cpudist.DistributedOptimizer, rank: int = 0, trainers: int = 1
) -> Callable[[Any], float]:
    """A step on the next batch, which takes any argument; returns its seconds."""
    batches, count = Batches(trainers), 0

    def step(_: Any = None) -> float:
        nonlocal count
        began = time.perf_counter()
        opt.zero_grad()
        loss_of(model, batches.part(count % len(batches), rank)).backward()
        computed = time.perf_counter() - began
        opt.step()
        count += 1
        return computed

    return step


def by_topic(found: list[cpudist.Advice]) -> dict[str, cpudist.Advice]:
    topics = {advice.topic: advice for advice in found}
    assert len(topics) == len(found)
    return topics


def until(topic: str, step: Callable[[], Any], find: Find) -> cpudist.Advice:
    """Steps until there is advice on this."""
    deadline = time.monotonic() + PATIENCE_S
    for _ in range(LEAST_STEPS):
        step()
    while topic not in (found := by_topic(find())):
        assert time.monotonic() < deadline, found
        for _ in range(5):
            step()
    return found[topic]


@contextlib.contextmanager
def alone(variables: dict[str, str]) -> Iterator[None]:
    """A world of one, in this thread."""
    cpudist.init(variables=variables)
    try:
        yield
    finally:
        cpudist.shutdown("none")


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This thread may use one core only, and threads that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- what it says ----------------------------------------------------------------------


def test_a_healthy_run_yields_no_advice() -> None:
    with one_core(), alone(ONE_THREAD):
        model, opt = wrapped()
        step = step_of(model, opt)
        done = cpudist.train_from_dataset(step, range(80), **COUNTED)
        assert done.steps == 80
        assert cpudist.advise(opt) == []
        # Nor does a loop of one's own, of which nobody counts the data.
        model, opt = wrapped()
        step = step_of(model, opt)
        for _ in range(80):
            step()
        assert cpudist.advise(opt) == []


def test_a_loop_that_waits_for_its_reader_is_told_so() -> None:
    took = [0.001]

    def slow() -> Iterator[None]:
        for _ in range(2 * LEAST_STEPS):
            time.sleep(TIMES * max(took[-1], 0.001))
            yield None

    def step(_: Any) -> None:
        began = time.perf_counter()
        train()
        took.append(time.perf_counter() - began)

    with one_core(), alone(ONE_THREAD):
        model, opt = wrapped()
        train = step_of(model, opt)
        cpudist.train_from_dataset(step, slow(), **COUNTED)
        found = by_topic(cpudist.advise(opt))
        assert found.keys() == {"data"}
        assert "waiting for the next batch" in found["data"].text
        assert 0.3 <= found["data"].figures["waiting"] <= 1.0
        # A loop of one's own: this thread has slept for nobody of the run.
        model, opt = wrapped()
        train = step_of(model, opt)
        for _ in slow():
            step(None)
        found = by_topic(cpudist.advise(opt))
        assert found.keys() == {"data"}
        assert "slept" in found["data"].text
        assert str(found["data"]) == f"data: {found['data'].text}"


def test_more_threads_than_cores_are_told() -> None:
    cores = topology.physical_cores()
    with alone({"CPUDIST_THREADS": str(4 * cores)}):
        model, opt = wrapped()
        step = step_of(model, opt)
        for _ in range(LEAST_STEPS):
            step()
        found = by_topic(cpudist.advise(opt))
    assert "threads" in found
    assert found["threads"].figures["threads"] == 4 * cores
    assert f"CPUDIST_THREADS={cores}" in found["threads"].text


def test_replicas_that_nobody_uses_are_told() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch)

    with alone({"CPU_NUM": "2"}):
        model, opt = wrapped()
        step = step_of(model, opt)
        for _ in range(LEAST_STEPS):
            step()
        found = by_topic(cpudist.advise(opt))
        assert "CPU_NUM=2" in found["replicas"].text
        assert "ReplicaExecutor" in found["replicas"].text
        batches = Batches(1)
        with cpudist.ReplicaExecutor(model, loss_fn, opt) as executor:
            assert executor.replicas == 2
            for number in range(LEAST_STEPS):
                executor.run(batches.part(number, 0))
            assert "replicas" not in by_topic(cpudist.advise(opt))
        # Closed, it steps nothing any more.
        assert "replicas" in by_topic(cpudist.advise(opt))


def test_a_slow_network_is_told() -> None:
    network = _core.InprocNetwork(
        _core.FaultPlan(delay=1.0, delay_ms_max=20 * TIMES, seed=4)
    )

    def body(context: cpudist.Context) -> cpudist.Advice:
        model, opt = wrapped()
        step = step_of(model, opt)
        return until("network", step, lambda: cpudist.advise(opt))

    (found,) = run(body, 1, servers=1, network=network)
    assert network.counts().delayed > LEAST_STEPS
    assert found.figures["waiting"] >= 0.3
    assert found.figures["requests_per_step"] >= 1
    assert "the network is slow" in found.text
    assert "Async" in found.text
    assert "wire_dtype='int8'" in found.text


def test_who_waits_for_a_slower_trainer_is_told() -> None:
    def body(context: cpudist.Context) -> set[str]:
        model, opt = wrapped()
        rank = context.trainer_rank
        step = step_of(model, opt, rank, 2)
        computed = 0.001
        for _ in range(2 * LEAST_STEPS):
            if rank:
                time.sleep(TIMES * max(computed, 0.002))
            computed = step()
        return set(by_topic(cpudist.advise(opt)))

    first, slower = run(body, 2)
    assert "strategy" in first
    assert not first & {"servers", "network", "data"}
    assert "strategy" not in slower


class Wide(nn.Module):
    """Little to compute, much to update."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def ask_much(context: cpudist.Context, report: Any) -> dict[str, Any] | None:
    """Trains until trainer 0 has been told of too few servers."""
    done = Path(os.environ[DONE])
    model = Wide()
    inner = torch.optim.Adam(model.parameters(), lr=1e-6)
    strategy = cpudist.Async(communicator=cpudist.Communicator(max_merge=1))
    opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)

    def step() -> None:
        opt.zero_grad()
        model().backward()
        opt.step()

    if context.trainer_rank:
        while not done.exists():
            step()
        return None
    try:
        found = until("servers", step, lambda: cpudist.advise(opt))
    finally:
        done.touch()
    others = [one.topic for one in cpudist.advise(opt)]
    return {"text": found.text, "figures": dict(found.figures), "topics": others}


@pytest.mark.processes
def test_too_few_servers_are_told(tmp_path: Path) -> None:
    variables = {**ONE_THREAD, DONE: str(tmp_path / "done")}
    with ProcessRanks(ask_much, TRAINERS + 1, servers=1, variables=variables) as ranks:
        found = ranks.results(PATIENCE_S)[1]
    figures = found["figures"]
    assert figures["load"] >= 0.6
    assert figures["waiting"] >= 0.3
    assert figures["servers"] == 1
    assert figures["servers_wanted"] >= 2
    assert f"CPUDIST_SERVERS={figures['servers_wanted']:.0f}" in found["text"]
    assert "network" not in found["topics"]


# -- how it is called ------------------------------------------------------------------


def test_too_few_steps_are_an_error_that_names_the_least() -> None:
    with alone(ONE_THREAD):
        model, opt = wrapped()
        step = step_of(model, opt)
        for count in (0, LEAST_STEPS - 1):
            while opt.stats()["steps"] < count:
                step()
            with pytest.raises(
                cpudist.TooFewStepsError, match=f"at least 20 .* found {count}"
            ):
                cpudist.advise(opt)
        step()
        assert isinstance(cpudist.advise(opt), list)
        opt.baseline.begin_anew()  # as where servers have come back
        with pytest.raises(cpudist.TooFewStepsError, match="found 0"):
            cpudist.advise(opt)


def test_what_is_no_optimizer_of_an_open_run_is_an_error() -> None:
    with alone(ONE_THREAD):
        model, opt = wrapped()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        with pytest.raises(cpudist.InvalidArgumentError, match="found SGD"):
            cpudist.advise(inner)  # type: ignore[arg-type]
        step = step_of(model, opt)
        for _ in range(LEAST_STEPS):
            step()
        opt.close()
        with pytest.raises(cpudist.ClosedError):
            cpudist.advise(opt)
    with pytest.raises(cpudist.ClosedError):
        cpudist.advise(opt)
