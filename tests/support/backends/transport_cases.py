# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of test_transport.py run, each as a process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from async_cases import Counting, asynchronous, backward, seeds_of, wrapped
from sync_cases import RULES, Batches, Model, build, loss_of

import torch_cpudist as cpudist
from torch_cpudist.testing import Report

STEPS = 12
WIDE = 700_000  # elements: several pieces of a payload
RULE_NAMES = ("adagrad", "adam")


def sync(name: str) -> dict[str, Any]:
    """Trains under Sync; the values as they are, to compare bit for bit."""
    context = cpudist.current()
    batches = Batches(context.trainer_count, steps=STEPS)
    model = Model()
    strategy = cpudist.Sync(sharding=cpudist.Sharding(min_block_size=8))
    optimizer = cpudist.DistributedOptimizer(
        build(RULES[name], model), model, strategy=strategy
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batches.part(step, context.trainer_rank)).backward()
        optimizer.step()
    optimizer.flush()
    optimizer.close()
    return {key: value.tolist() for key, value in model.state_dict().items()}


def counts() -> dict[str, Any]:
    """Trains under Async with whole numbers, whose sum tells what was applied."""
    context = cpudist.current()
    model = Counting()
    optimizer = wrapped(model, asynchronous({"send_queue_size": 4, "max_merge": 3}))
    for seed in seeds_of(context.trainer_rank, 40):
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()
    optimizer.leave()
    context.barrier()
    optimizer.flush()
    optimizer.close()
    return {key: value.tolist() for key, value in model.state_dict().items()}


def wide() -> bool:
    """Payloads of several megabytes arrive whole."""
    context = cpudist.current()
    weight = torch.nn.Parameter(torch.zeros(WIDE))
    model = torch.nn.ParameterList([weight])
    optimizer = wrapped(model, cpudist.Sync(), lr=1.0)
    for _ in range(3):
        weight.grad = torch.arange(float(WIDE)) * (context.trainer_rank + 1)
        optimizer.step()
    mean = (context.trainer_count + 1) / 2
    expected = torch.arange(float(WIDE)) * mean * -3
    optimizer.close()
    return torch.equal(weight.detach(), expected)


def traffic() -> dict[str, Any]:
    """What client and server have counted, and where the server listens."""
    context = cpudist.current()
    client = context.trainer_client().stats()
    server = context.server.stats() if context.server is not None else None
    return {
        "client": [client["bytes_sent"], client["bytes_received"]],
        "server": server and [server["bytes_received"], server["bytes_sent"]],
        "reconnects": client["reconnects"],
        "addresses": context.addresses(),
    }


def lane_threads() -> int:
    """Threads of this process that carry frames over the backend."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += (task / "comm").read_text().startswith("cpudist-lane")
    return found


def everything(context: cpudist.Context, report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {name: sync(name) for name in RULE_NAMES}
    found["counts"] = counts()
    found["wide"] = wide()
    context.barrier()
    found["traffic"] = traffic()
    found["threads"] = lane_threads()
    context.shutdown()
    found["threads left"] = lane_threads()
    return found


def train_forever(context: cpudist.Context, report: Report) -> None:
    """Steps without end; reports once that training runs."""
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(50, 4, sparse=True), torch.nn.Linear(4, 1)
    )
    inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer = cpudist.DistributedOptimizer(inner, model)
    for step in range(10**9):
        optimizer.zero_grad()
        model(torch.randint(50, (8, 3))).square().mean().backward()
        optimizer.step()
        if step == 3:
            report("training")
