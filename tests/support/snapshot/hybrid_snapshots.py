# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of Hybrid that are saved and resumed, as threads or processes."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import torch
from snapshot_cases import settle
from whole_gradients import ROWS, model_of, push

import torch_cpudist as cpudist
from torch_cpudist.drivers.queued_saving import QueuedSaving
from torch_cpudist.drivers.saving import CutAnswer

STEPS = 14
SPARSE = {"sync": cpudist.Sync, "async": cpudist.Async, "geo": cpudist.Geo}
DENSE = {
    "allreduce": cpudist.AllReduce(),
    "reduce": cpudist.Reduce(),
    "local_sgd": cpudist.LocalSGD(every=3),
    "sync": cpudist.Sync(),
}
RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def hybrid_job(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """Trains up to a step, from where the newest snapshot is.

    ``case``: ``sparse``, ``dense``, ``rule``, ``steps``; ``resume``, its arguments;
    ``slow``, the trainer that gets answers to its marks late; ``name``, of a snapshot
    that is asked for while the last step's is under way.
    """
    model = model_of(case.get("remote", False))
    strategy = cpudist.Hybrid(
        dense=DENSE[case["dense"]],
        sparse=SPARSE[case["sparse"]](),
        sharding=cpudist.Sharding(min_block_size=2),
    )
    inner = RULES[case["rule"]](model.parameters())
    opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
    started = None
    if "resume" in case:
        started = opt.resume(**case["resume"])
    if case.get("slow") == rank:
        _answer_late()
    for step in range(started.step if started else 0, case["steps"]):
        push(opt, model, rank, step)
        if "name" not in case:
            settle(opt)
    if "name" in case:
        opt.save_snapshot(case["name"])
    cpudist.barrier()
    opt.flush()
    with torch.no_grad():
        rows = model.table(torch.arange(ROWS)).clone()
    state = opt.state_dict()["state"]
    values = {"rows": rows, "dense": model.dense.detach().clone()}
    for number, parts in state.items():
        for name, value in parts.items():
            values[f"{number} {name}"] = torch.as_tensor(value)
    return {
        "values": values,
        "step": started.step if started else 0,
        "report": list(started.report) if started else [],
        "stats": opt.stats().get("snapshot"),
    }


def _answer_late() -> None:
    """Only every seventh time that is asked for answers there may be one."""
    known, asked = QueuedSaving.answer, itertools.count(1)

    def answer(self: QueuedSaving) -> CutAnswer | None:
        return known(self) if next(asked) % 7 == 0 else None

    QueuedSaving.answer = answer  # in this process alone


def ranks_of(context: cpudist.Context, report: Any) -> Any:
    """What the trainers of a test run as processes; what to do is in ``CASE``."""
    torch.set_num_threads(1)
    found = hybrid_job(context.trainer_rank, json.loads(os.environ["CASE"]))
    values = found.pop("values")
    return {**found, "rows": values["rows"].tolist(), "dense": values["dense"].tolist()}
