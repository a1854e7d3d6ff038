# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How to see settings of the strategies that average among trainers.

``settings_cases`` has the others, and says how to add one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from async_cases import wrapped
from patience import PATIENCE_S
from settings_cases import Given, field, push_ones, with_optimizer
from sync_cases import ONE_THREAD
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks


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


@field(cpudist.Reduce, "bucket_bytes", changed=40)
def _what_travels_to_owners(given: Given) -> Any:
    return _collective(given, "reduce", 1)["buckets"]


_HALVED = {"compression": "bf16"}
_HALVED_BY_VARIABLE = {"CPUDIST_ALLREDUCE_COMPRESSION": "bf16"}


def _sent_bytes(context: cpudist.Context, _report: Any) -> list[int]:
    """What trainers send without compression, with it, and by the variable."""
    found = []
    own = context.environment
    for fields, variables in (
        ({}, {}),
        (_HALVED, {}),
        ({"compression": "none"}, _HALVED_BY_VARIABLE),
    ):
        context.environment = dataclasses.replace(own, values=variables)
        model = Layers()
        optimizer = wrapped(model, cpudist.AllReduce(**fields))
        push_ones(optimizer, model, 1)
        found.append(optimizer.stats()["collective"]["sent_bytes"])
        optimizer.close()
    context.environment = own
    return found


@functools.cache
def _sent_bytes_of_a_trainer() -> list[int]:
    # One launch for all that is seen: a world of one sends nothing.
    with ProcessRanks(_sent_bytes, 2, variables=ONE_THREAD) as ranks:
        found: list[int] = ranks.results(PATIENCE_S)[0]
        return found


@field(cpudist.AllReduce, "compression", changed="bf16")
def _how_much_is_sent(given: Given) -> Any:
    cases = [({"compression": "none"}, {}), (_HALVED, {})]
    cases.append(({"compression": "none"}, _HALVED_BY_VARIABLE))
    here = (dict(given.fields), dict(given.variables))
    return _sent_bytes_of_a_trainer()[cases.index(here)]


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
