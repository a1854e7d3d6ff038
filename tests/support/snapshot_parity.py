# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs on servers whose ends are compared bit by bit, saved and resumed or not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from snapshot_cases import settle
from sync_cases import DIM, ROWS, RULES, Batches, build, loss_of, run
from torch import nn

import torch_cpudist as cpudist

SMALL = cpudist.Sharding(min_block_size=8)


class Net(nn.Module):
    """As ``sync_cases.Model``, with a table that may be remote."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
        self.first = nn.Linear(DIM, 6)
        self.last = nn.Linear(6, 1)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in (*self.first.parameters(), *self.last.parameters()):
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values / 2)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.bag(ids) + dense))).squeeze(1)


def net(remote: bool) -> Net:
    """A model whose table is remote or not; rows begin as zeros."""
    made = cpudist.remote_tables(min_rows=1) if remote else contextlib.nullcontext()
    with made:
        model = Net()
    nn.init.zeros_(model.bag.weight)
    return model


@dataclass(frozen=True)
class Job:
    """What is trained, by how many."""

    trainers: int = 2
    servers: int = 0
    rule: str = "adagrad"
    remote: bool = False
    average: float = 0.0
    prefetch: int = 0
    wire: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def ended(
    job: Job,
    steps: int,
    folder: Any = None,
    every: int | None = 4,
    at: str | None = None,
) -> Any:
    """What every trainer has at the end, and where it started.

    ``at``: what is given to ``resume`` in the place of ``folder``.
    """
    batches = Batches(job.trainers, steps=steps)

    def body(context: cpudist.Context) -> Any:
        model = net(job.remote)
        average = cpudist.EMA(job.average) if job.average else None
        communicator = {"wire_dtype": job.wire} if job.wire else {}
        strategy = cpudist.Sync(sharding=SMALL, communicator=communicator)
        inners = build(RULES[job.rule], model)
        opt = cpudist.DistributedOptimizer(
            inners, model, strategy=strategy, average=average
        )
        schedule = torch.optim.lr_scheduler.StepLR(inners[0], 3, 0.9)
        started = None
        if folder is not None:
            state = {"schedule": schedule}
            place = at or folder
            started = opt.resume(place, every_steps=every, state=state, **job.options)
        first = started.step if started else 0
        parts = [batches.part(i, context.trainer_rank) for i in range(first, steps)]
        source: Any = parts
        if job.prefetch:
            source = cpudist.data.prefetch(
                parts, opt, lambda b: {model.bag: b[0]}, depth=job.prefetch
            )
        for part in source:
            opt.zero_grad()
            loss_of(model, part).backward()
            opt.step()
            schedule.step()
            settle(opt)
        opt.flush()
        cpudist.barrier()
        return seen(opt, model, job), started, opt.stats().get("snapshot")

    return run(body, job.trainers, servers=job.servers, variables=seeing(folder))


def seeing(folder: Any) -> dict[str, str]:
    """What tells servers of their own where snapshots are."""
    return {"CPUDIST_SNAPSHOT_DIR": str(folder)} if folder else {}


def rows_of(model: Net) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.bag(torch.arange(ROWS).unsqueeze(1))
    return found.clone()


def seen(
    opt: cpudist.DistributedOptimizer, model: Net, job: Job
) -> dict[str, torch.Tensor]:
    """All values, averages and state that a trainer can see."""
    found = {"rows": rows_of(model)}
    dense = [*model.first.named_parameters(), *model.last.named_parameters()]
    for number, (_, parameter) in enumerate(dense):
        found[f"dense {number}"] = parameter.detach().clone()
    state = opt.state_dict()
    for i, one in enumerate(state.get("optimizers", [state])):
        for index, parts in one["state"].items():
            for name, value in parts.items():
                if isinstance(value, torch.Tensor):
                    found[f"state {i} {index} {name}"] = value.clone()
    if job.average:
        with opt.averaged():
            found["average rows"] = rows_of(model)
            for number, (_, parameter) in enumerate(dense):
                found[f"average {number}"] = parameter.detach().clone()
    return found
