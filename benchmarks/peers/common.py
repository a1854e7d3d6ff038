# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What all peers of the case ``ctr`` share: model, batches, measured loop, report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import ctr_data
import numpy as np
import torch
import usage
from job import HIDDEN, Gate, Job
from torch import nn

EMBEDDING_STD = 0.01
# torch.optim.Adagrad's own default, said because the fused kernels have another.
ADAGRAD_EPS = 1e-10
EVALUATION_BATCH = 4096
LOSS_SPAN_STEPS = 20
PHASES = ("data", "forward", "backward", "step")


class Batch(NamedTuple):
    """``ids`` int64 [batch, slots], ``dense`` [batch, dense], ``labels`` [batch]."""

    ids: torch.Tensor
    dense: torch.Tensor
    labels: torch.Tensor


class Trainee(Protocol):
    """What a peer trains; the measured loop is the same for all."""

    def zero_grad(self) -> None: ...

    def logits(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor: ...

    def step(self) -> None: ...

    def learn(self, batch: Batch) -> float | None:
        """Does a whole step by itself and returns its loss; None: it does not."""
        ...

    def counters(self) -> dict[str, float]:
        """Returns ``bytes`` sent and ``wait_s`` blocked so far, as far as known."""
        ...

    def source(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Returns where the loop reads its batches from."""
        ...

    def settle(self) -> None:
        """Ends training, before the evaluation."""
        ...


def spec_of(job: Job) -> ctr_data.CtrSpec:
    """Returns what the data of ``job`` was drawn from."""
    facts = json.loads((Path(job.data_dir) / "facts.json").read_text())
    return ctr_data.CtrSpec(**facts["spec"])


def make_mlp(
    spec: ctr_data.CtrSpec, dim: int, hidden: Sequence[int] = HIDDEN
) -> nn.Sequential:
    """Returns the network above the embeddings; equal on every rank for one seed."""
    widths = (spec.slots * dim + spec.dense, *hidden)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


class CtrModel(nn.Module):
    """All slots in one sparse table, joined with the dense features, then an MLP."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        spec = spec_of(job)
        torch.manual_seed(job.seed)
        self.mlp = make_mlp(spec, job.dim, job.hidden)
        weight = torch.empty(spec.rows, job.dim).normal_(std=EMBEDDING_STD)
        self.table = nn.Embedding(spec.rows, job.dim, sparse=True, _weight=weight)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch] for ``ids`` [batch, slots] and ``dense``."""
        rows = self.table(ids).flatten(1)
        return self.mlp(torch.cat([rows, dense], dim=1)).squeeze(1)


class TorchTrainee:
    """A module and a torch optimizer; the base of every peer.

    Where the model computes on a device, ids stay on the CPU if its table does.
    """

    def __init__(self, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.job, self.model, self.optimizer = job, model, optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def logits(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        device = self.job.device
        with torch.autocast(device, torch.bfloat16, enabled=self.job.bf16):
            out: torch.Tensor = self.model(ids.to(device), dense.to(device))
        return out.float()

    def step(self) -> None:
        self.optimizer.step()

    def learn(self, batch: Batch) -> float | None:
        return None

    def counters(self) -> dict[str, float]:
        return {"bytes": float(usage.tcp_bytes_sent())}

    def source(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        return batches

    def settle(self) -> None:
        """Nothing is under way after a step."""


def adagrad(job: Job, parameters: Iterator[nn.Parameter]) -> torch.optim.Adagrad:
    """Returns the optimizer every peer uses, with torch's own defaults."""
    return torch.optim.Adagrad(parameters, lr=job.lr, eps=ADAGRAD_EPS)


def batches(samples: ctr_data.Samples, size: int) -> Iterator[Batch]:
    """Yields batches for ever, copied from the mapped files as a reader would."""
    if len(samples.labels) < size:
        raise ValueError(f"{len(samples.labels)} samples make no batch of {size}")
    while True:
        for begin in range(0, len(samples.labels) - size + 1, size):
            yield to_batch(samples, slice(begin, begin + size))


def to_batch(samples: ctr_data.Samples, here: slice) -> Batch:
    """Copies a range of samples into tensors."""
    return Batch(
        torch.from_numpy(samples.ids[here].astype(np.int64)),
        torch.from_numpy(np.array(samples.dense[here])),
        torch.from_numpy(np.array(samples.labels[here])),
    )


@dataclass
class Loop:
    """The training loop, with the time each phase of a step takes."""

    trainee: Trainee
    source: Iterator[Batch]
    losses: list[float] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)

    def run_step(self) -> None:
        trainee, marks = self.trainee, [time.perf_counter()]
        batch = next(self.source)
        marks.append(time.perf_counter())
        if (loss := trainee.learn(batch)) is not None:
            self.losses.append(loss)
            self._note(("data", "all phases"), [*marks, time.perf_counter()])
            return
        ids, dense, labels = batch
        trainee.zero_grad()
        logits = trainee.logits(ids, dense)
        loss = nn.functional.binary_cross_entropy_with_logits(
            logits, labels.to(logits.device)
        )
        self.losses.append(loss.item())
        marks.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(time.perf_counter())
        trainee.step()
        marks.append(time.perf_counter())
        self._note(PHASES, marks)

    def _note(self, phases: Sequence[str], marks: Sequence[float]) -> None:
        for phase, (begin, end) in zip(phases, pairwise(marks), strict=True):
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + end - begin


def server_pids(job: Job) -> list[int]:
    """Returns the processes that only serve; they have left their names."""
    return [int(path.suffix[1:]) for path in Path(job.run_dir).glob("server.*")]


def measure(job: Job, rank: int, trainee: Trainee) -> None:
    """Warms up, trains for the window, evaluates and writes the report of ``rank``."""
    samples = ctr_data.load(Path(job.data_dir), "train").part(rank, job.trainers)
    loop = Loop(trainee, trainee.source(batches(samples, job.batch)))
    gate = Gate(job, rank)
    for _ in range(job.warmup_steps):
        loop.run_step()
    gate.meet()
    servers = server_pids(job) if rank == 0 else []
    loop.phases_s.clear()
    before = trainee.counters()
    servers_cpu_s = sum(map(usage.cpu_s, servers))
    cpu_s, begin = usage.own_cpu_s(), time.perf_counter()
    steps = 0
    while not (last := job.steps or gate.last_step()) or steps < last:
        loop.run_step()
        steps += 1
        if rank == 0 and not last and time.perf_counter() - begin >= job.seconds:
            gate.stop_after(steps)
    seconds, cpu_s = time.perf_counter() - begin, usage.own_cpu_s() - cpu_s
    servers_cpu_s = sum(map(usage.cpu_s, servers)) - servers_cpu_s
    after = trainee.counters()
    gate.meet()
    trainee.settle()
    quality = evaluate(job, trainee)
    report = {
        "rank": rank,
        "samples": steps * job.batch,
        "steps": steps,
        "seconds": seconds,
        "cpu_s": cpu_s + servers_cpu_s,
        "bytes": after["bytes"] - before["bytes"],
        "wait_s": after.get("wait_s", math.nan) - before.get("wait_s", math.nan),
        "rss_mb": usage.peak_rss_mb() + sum(map(usage.peak_rss_mb, servers)),
        "quality": quality,
        "loss_first": float(np.mean(loop.losses[:LOSS_SPAN_STEPS])),
        "loss_last": float(np.mean(loop.losses[-LOSS_SPAN_STEPS:])),
        "phases_s": loop.phases_s,
    }
    path = job.report_path(rank)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.rename(path)
    gate.meet()


@torch.no_grad()
def evaluate(job: Job, trainee: Trainee) -> float:
    """Returns the AUC on the held-out samples, in single precision or as trained."""
    samples = ctr_data.load(Path(job.data_dir), "test")
    total = len(samples.labels)
    parts = (
        to_batch(samples, slice(begin, min(begin + EVALUATION_BATCH, total)))
        for begin in range(0, total, EVALUATION_BATCH)
    )
    scores = chain.from_iterable(trainee.logits(b.ids, b.dense).tolist() for b in parts)
    return ctr_data.auc(samples.labels, np.fromiter(scores, np.float32, total))
