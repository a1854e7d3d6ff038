# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How to see settings of replicas; ``settings_cases`` has the others."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from settings_cases import Given, field, with_optimizer
from settings_process import variable
from torch import nn

import torch_cpudist as cpudist


def _executor(given: Given) -> Any:
    """Replicas, their torch threads, and bytes of their copies, in a step."""
    threads: dict[str, int] = {}

    def loss_fn(model: Any, part: torch.Tensor) -> torch.Tensor:
        threads[threading.current_thread().name] = torch.get_num_threads()
        return (model.dense.sum() * part).mean()

    def see(optimizer: cpudist.DistributedOptimizer, model: Any) -> Any:
        with cpudist.ReplicaExecutor(model, loss_fn, optimizer) as executor:
            executor.run(torch.ones(64))
            return len(threads), set(threads.values()), executor.stats()["copy_bytes"]

    return with_optimizer(
        {"name": "sync", "replicas": given.with_fields()},
        see,
        variables={"CPUDIST_REPLICAS_COUNT": "2", **given.variables}
        if "count" not in given.fields
        else given.variables,
    )


@field(cpudist.Replicas, "count", plain=2, changed=3)
@field(cpudist.Replicas, "reduce", changed="allreduce")
@field(cpudist.Replicas, "num_threads", plain=1, changed=2)
def _what_replicas_do(given: Given) -> Any:
    return _executor(given)


@variable("PIN", changed="1")
def _cores(given: Given) -> Any:
    """The cores of each replica; where all have the only one, what two replicas get."""
    found: list[set[int]] = []
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_fn(net: nn.Module, part: torch.Tensor) -> torch.Tensor:
        found.append(os.sched_getaffinity(0))
        return net(part).mean()

    context = cpudist.init(variables={"CPUDIST_THREADS": "1", **given.variables})
    try:
        count = max(2, len(os.sched_getaffinity(0)))
        with cpudist.ReplicaExecutor(model, loss_fn, optimizer, count) as executor:
            executor.run(torch.ones(count, 1))
    except cpudist.ConfigurationError as error:
        # With cores of their own they are never more than those.
        one = len(os.sched_getaffinity(0)) == 1
        if one and "CPUDIST_PIN=1: 2 replicas" in str(error):
            return "refused"
        raise
    finally:
        context.abort("the observation is over")
    return sorted(map(sorted, found))
