# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A rank of the case ``scale``: a server, or a trainer whose compute is a sleep.

What travels is real: batches, lookups, gradients of the rows of each batch and of the
dense network, by the wrapped optimizer. Only the network between them is not computed:
it sleeps as long as the whole forward and backward took one trainer alone, and returns
the gradients of one true backward.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ctr_data
import torch
import usage
from hosts import INTERFACE
from job import Gate, Job
from torch import nn

import torch_cpudist as cpudist
from peers.common import Batch, CtrModel, Loop, adagrad, batches, server_pids
from peers.cpudist_rank import CpudistTrainee, place_tables, serve, strategy_of

MEASURED_STEPS = 30
# Trainers that rest may not take the cores from those that are measured.
POLL_S = 0.02
PHASE_RATIO = 4


class Compute(NamedTuple):
    """Seconds that the forward, with the loss, and the backward of a step take."""

    forward_s: float
    backward_s: float


def counts(trainers: int) -> list[int]:
    """Returns how many trainers train in each phase: 1, …, ``trainers``."""
    found = [trainers]
    while found[0] > 1:
        found.insert(0, max(1, found[0] // PHASE_RATIO))
    return found


def true_step(model: CtrModel, batch: Batch) -> Compute:
    """Computes the gradients of a batch on the plain model and returns the seconds."""
    marks = [time.perf_counter()]
    logits = model(batch.ids, batch.dense)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    marks.append(time.perf_counter())
    loss.backward()  # type: ignore[no-untyped-call]
    marks.append(time.perf_counter())
    return Compute(marks[1] - marks[0], marks[2] - marks[1])


def measure_compute(model: CtrModel, batch: Batch) -> Compute:
    """Returns medians of true steps."""
    steps = []
    for _ in range(MEASURED_STEPS):
        model.zero_grad()
        steps.append(true_step(model, batch))
    return Compute(*(median(one) for one in zip(*steps, strict=True)))


class SleepingNetwork(torch.autograd.Function):
    """In place of the network above the lookups: sleeps, returns known gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        compute: Compute,
        gradients: list[torch.Tensor],
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        time.sleep(compute.forward_s)
        ctx.backward_s, ctx.gradients = compute.backward_s, gradients
        return rows.new_zeros(len(rows))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        time.sleep(ctx.backward_s)
        rows, *dense = ctx.gradients
        # Autograd may keep a dense one as the parameter's gradient itself.
        return (rows, None, None, *(one.clone() for one in dense))


class SleepingModel(CtrModel):
    """Looks the rows up; the network has its parameters but is slept."""

    def __init__(self, job: Job, batch: Batch) -> None:
        super().__init__(job)
        self.gradients = true_gradients(self, batch)
        self.compute = Compute(0.0, 0.0)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch], all zero, as soon as they would be there."""
        rows = self.table(ids).flatten(1)
        found: torch.Tensor = SleepingNetwork.apply(
            rows, self.compute, self.gradients, *self.mlp.parameters()
        )
        return found


def true_gradients(model: CtrModel, batch: Batch) -> list[torch.Tensor]:
    """Returns those of the rows [batch, slots x dim] and of every dense parameter."""
    rows = model.table(batch.ids).flatten(1).detach().requires_grad_()
    logits = model.mlp(torch.cat([rows, batch.dense], dim=1)).squeeze(1)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
    return list(torch.autograd.grad(loss, [rows, *model.mlp.parameters()]))


class Counters:
    """What trainer 0 reads of the servers and the machine, from the kernel."""

    def __init__(self, job: Job, rank: int) -> None:
        self._servers = server_pids(job) if rank == 0 else []
        self._first = self._read()

    def _read(self) -> list[list[float]]:
        servers = [
            [usage.cpu_s(pid), *map(float, usage.cable_bytes(pid, INTERFACE))]
            for pid in self._servers
        ]
        return [*servers, list(usage.machine_ticks())]

    def report(self) -> dict[str, Any]:
        """Returns what has been added since this object was made."""
        *servers, machine = (
            [now - then for now, then in zip(after, before, strict=True)]
            for after, before in zip(self._read(), self._first, strict=True)
        )
        return {
            "servers": [
                {"cpu_s": cpu_s, "received": received, "sent": sent}
                for cpu_s, received, sent in servers
            ],
            "machine_share": machine[0] / machine[1],
        }


def window(job: Job, rank: int, loop: Loop) -> dict[str, Any]:
    """Trains for the job's seconds and returns what this trainer did."""
    counters, steps = Counters(job, rank), 0
    before, cable = loop.trainee.counters(), usage.cable_bytes("self", INTERFACE)
    cpu_s, begin = usage.own_cpu_s(), time.perf_counter()
    while (seconds := time.perf_counter() - begin) < job.seconds or not steps:
        loop.run_step()
        steps += 1
    cpu_s = usage.own_cpu_s() - cpu_s
    after, cable_now = loop.trainee.counters(), usage.cable_bytes("self", INTERFACE)
    return {
        "samples": steps * job.batch,
        "steps": steps,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "bytes": after["bytes"] - before["bytes"],
        "wait_s": after["wait_s"] - before["wait_s"],
        "received": cable_now[0] - cable[0],
        "sent": cable_now[1] - cable[1],
        **counters.report(),
    }


def phases(
    job: Job, rank: int, loop: Loop, gate: Gate, leave: Callable[[], None]
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yields the trainers of each phase, and what this one did if it took part."""
    leave()  # until its first step
    in_rounds = job.strategy.partition(":")[0] in ("sync", "half_async")
    for count in counts(job.trainers):
        gate.meet()
        if rank < count:
            for _ in range(job.warmup_steps):
                loop.run_step()
        if in_rounds:  # the others do not wait for one that has no step to make
            leave()
        gate.meet()
        yield count, window(job, rank, loop) if rank < count else None
        if in_rounds:
            leave()
    gate.meet()


def agree(job: Job, rank: int, gate: Gate, batch: Batch) -> Compute:
    """Returns what is slept: measured by trainer 0 while the others rest."""
    path = Path(job.run_dir) / "compute.json"
    gate.meet()
    if rank == 0:
        path.write_text(json.dumps(measure_compute(CtrModel(job), batch)))
    gate.meet()
    found = Compute(*json.loads(path.read_text()))
    scale = job.step_ms / 1e3 / sum(found) if job.step_ms else 1.0
    return Compute(*(scale * seconds for seconds in found))


def train(job: Job, rank: int) -> None:
    """Trains or serves, as ``init()`` says; ``rank`` counts servers, too."""
    cpudist.init()
    if cpudist.is_server():
        serve(job)
    else:
        _train(job, cpudist.trainer_rank())
    cpudist.shutdown(pull="none")


def _train(job: Job, rank: int) -> None:
    samples = ctr_data.load(Path(job.data_dir), "train").part(rank, job.trainers)
    source = batches(samples, job.batch)
    first = next(source)
    model = SleepingModel(job, first)
    place_tables(model, job.strategy)
    strategy, depth = strategy_of(job.strategy)
    optimizer = cpudist.DistributedOptimizer(
        adagrad(job, model.parameters()), model, strategy=strategy
    )
    trainee = CpudistTrainee(job, model, optimizer)
    trainee.prefetch_depth = depth
    gate = Gate(job, rank, POLL_S)
    compute = agree(job, rank, gate, first)
    model.compute = Compute(*(job.dilation * seconds for seconds in compute))
    loop = Loop(trainee, trainee.source(source))
    done = dict(phases(job, rank, loop, gate, optimizer.leave))
    report = {"rank": rank, "step_s": sum(compute), "phases": done}
    partial = job.report_path(rank).with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.rename(job.report_path(rank))
    gate.meet()
    # Nobody asks for the result: leaving would send all that moved since the last
    # exchange through full cables.
    optimizer.close()
