# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How to see settings of the strategies that average among trainers.

``settings_cases`` has the others, and says how to add one.
"""

from __future__ import annotations

from typing import Any

import torch
from settings_cases import Given, field, push_ones, with_optimizer
from torch import nn

import torch_cpudist as cpudist


class Layers(nn.Module):
    """Two dense parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(10))
        self.other = nn.Parameter(torch.zeros(10))


def _collective(given: Given, name: str, steps: int) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, model: Any) -> Any:
        push_ones(optimizer, model, steps)
        return optimizer.stats()["collective"]

    strategy = {"name": name, **given.fields}
    return with_optimizer(strategy, see, model=Layers, variables=given.variables)


@field(cpudist.AllReduce, "bucket_bytes", changed=40)
def _what_travels_together(given: Given) -> Any:
    return _collective(given, "allreduce", 1)["buckets"]


@field(cpudist.LocalSGD, "every", changed=3)
@field(cpudist.LocalSGD, "warmup_steps", changed=4)
def _how_often_trainers_average(given: Given) -> Any:
    return _collective(given, "local_sgd", 7)["averages"]


_PART = {"dense": cpudist.AllReduce(), "sparse": cpudist.Async()}


@field(
    cpudist.Hybrid,
    "dense",
    plain=_PART["dense"],
    changed=cpudist.Sync(),
    text="sync",
)
@field(
    cpudist.Hybrid,
    "sparse",
    plain=_PART["sparse"],
    changed=cpudist.Geo(),
    text="geo",
)
def _what_parts_do(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, _: Any) -> Any:
        return sorted({"collective", "exchange"} & optimizer.stats().keys())

    strategy = {"name": "hybrid", **given.fields}
    return with_optimizer(strategy, see, variables=given.variables)
