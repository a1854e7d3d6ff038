# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: a function for each setting
"""How to see that a setting has an effect: one function per field.

To add one, write a function of a ``Given`` that returns what it saw, under
``@field(class, name, changed=value)``. It is run with the field plain and changed, by
argument and by environment, and must see a difference.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as entry
from typing import Any
from unittest import mock

import torch
from async_cases import Counting, wrapped
from foreseen_cases import WATCHED, Columns, batches_of, one_step
from patience import PATIENCE_S
from sync_cases import ONE_THREAD, run
from torch import nn
from torch._C._distributed_c10d import HashStore

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.settings.communicator import Communicator
from torch_cpudist.settings.delay_compensation import DelayCompensation
from torch_cpudist.settings.outer import Outer
from torch_cpudist.settings.server import Server
from torch_cpudist.settings.sharding import Sharding


@dataclass(frozen=True)
class Given:
    """How one setting is given: as an argument of its class, or by a variable."""

    fields: Mapping[str, Any] = entry(default_factory=dict)
    variables: Mapping[str, str] = entry(default_factory=dict)

    def with_fields(self, **others: Any) -> dict[str, Any]:
        """The arguments, and others that the observation needs."""
        return {**others, **self.fields}


See = Callable[[Given], Any]


@dataclass(frozen=True)
class Observer:
    """What sees a setting, and two values of it that it tells apart."""

    see: See
    plain: Any
    changed: Any
    text: str  # the changed value as a variable has it


FIELDS: dict[tuple[type, str], Observer] = {}


def field(kind: type, name: str, **values: Any) -> Callable[[See], See]:
    """Notes what sees a field.

    ``changed`` and ``plain`` (its default unless given) are arguments, ``text`` is
    ``changed`` as a variable has it (``str(changed)`` unless given).
    """

    def note(see: See) -> See:
        default = kind.__dataclass_fields__[name].default
        changed = values["changed"]
        FIELDS[kind, name] = Observer(
            see,
            plain=values.get("plain", default),
            changed=changed,
            text=values.get("text", str(changed)),
        )
        return see

    return note


# -- helpers -----------------------------------------------------------------------


class Blocks(nn.Module):
    """Parameters of unlike sizes, to be cut and dealt."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (6, 40, 30, 24, 10)
        self.parts = nn.ParameterList(torch.zeros(n) for n in sizes)


def slow() -> _core.InprocNetwork:
    """A network on which every frame takes a while."""
    return _core.InprocNetwork(_core.FaultPlan(delay=1.0, delay_ms_max=8, seed=3))


def with_optimizer(
    strategy: Any,
    see: Callable[[cpudist.DistributedOptimizer, Any], Any],
    *,
    model: Callable[[], nn.Module] = Counting,
    servers: int = 1,
    variables: Mapping[str, str] | None = None,
    network: _core.InprocNetwork | None = None,
) -> Any:
    """What ``see`` sees of one trainer's optimizer, SGD with lr 1, and its model."""

    def body(context: cpudist.Context) -> Any:
        trained = model()
        return see(wrapped(trained, strategy), trained)

    return run(body, 1, servers, variables=dict(variables or {}), network=network)[0]


def push_ones(optimizer: cpudist.DistributedOptimizer, model: Any, steps: int) -> None:
    """Steps whose gradient is 1 everywhere in the dense vector."""
    for _ in range(steps):
        model.dense.grad = torch.ones_like(model.dense)
        optimizer.step()


# -- Sharding ----------------------------------------------------------------------


def _placement(given: Given, **others: Any) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, _: Any) -> Any:
        blocks = optimizer.trained.placement.layout.blocks
        return [(block.name, block.elements, block.shard) for block in blocks]

    strategy = {"name": "sync", "sharding": given.with_fields(**others)}
    return with_optimizer(
        strategy, see, model=Blocks, servers=2, variables=given.variables
    )


@field(Sharding, "slice", changed=False)
@field(Sharding, "split_method", changed="balanced")
def _places(given: Given) -> Any:
    return _placement(given, min_block_size=8)


@field(Sharding, "min_block_size", changed=8)
def _sizes(given: Given) -> Any:
    return _placement(given)


# -- Server ------------------------------------------------------------------------


def _alone(given: Given, see: Callable[[], Any]) -> Any:
    """A world of one whose server is started with these settings."""
    context = cpudist.init(
        rank=0,
        world_size=1,
        store=HashStore(),
        network=_core.InprocNetwork(),
        server=given.fields,
        variables={**ONE_THREAD, **given.variables},
    )
    try:
        return see()
    finally:
        context.abort("the observation is over")


@field(Server, "threads", plain=1, changed=9)
def _threads_of_a_server(given: Given) -> Any:
    before = len(os.listdir("/proc/self/task"))
    more = _alone(given, lambda: len(os.listdir("/proc/self/task")) - before)
    # A round's helpers; the others of a rank are fewer than that.
    return more >= 8


@field(Server, "memory_cap_bytes", changed=40)
def _memory_of_a_server(given: Given) -> Any:
    def see() -> str:
        try:
            wrapped(Counting(), "sync")
        except cpudist.OverloadedError:
            return "refused"
        return "taken"

    return _alone(given, see)


@field(Server, "snapshot_memory_bytes", changed=1 << 20)
def _memory_of_snapshots(given: Given) -> Any:
    make = _core.Server
    told = []

    def observed(**options: Any) -> _core.Server:
        told.append(options["snapshot_memory_bytes"])
        return make(**options)

    # What the server does with it, the core's own tests see.
    with mock.patch.object(_core, "Server", observed):
        _alone(given, lambda: None)
    return told


@field(Server, "nonfinite", changed="skip")
def _gradients_of_nan(given: Given) -> Any:
    def see() -> str:
        model = Counting()
        opt = wrapped(model, "sync")
        model.dense.grad = torch.full_like(model.dense, math.nan)
        try:
            opt.step()
        except cpudist.NonFiniteGradientError:
            return "refused"
        return "skipped"

    return _alone(given, see)


# -- Communicator and Async --------------------------------------------------------


def _queue(given: Given, **others: Any) -> dict[str, Any]:
    """What a queue says after ten steps over a slow network, and what they made."""

    def see(optimizer: cpudist.DistributedOptimizer, model: Any) -> Any:
        push_ones(optimizer, model, 10)
        optimizer.flush()
        return {**optimizer.stats()["staleness"], "weight": model.dense[0].item()}

    strategy = {"name": "async", "communicator": given.with_fields(**others)}
    return with_optimizer(strategy, see, variables=given.variables, network=slow())


@field(Communicator, "send_queue_size", plain=1, changed=8)
def _how_many_wait(given: Given) -> Any:
    # One on its way, one that waits, and one whose answer came too late for its step.
    return _queue(given, max_merge=1)["steps_max"] > 3


@field(Communicator, "max_merge", plain=1, changed=8)
def _how_many_travel_together(given: Given) -> Any:
    return _queue(given, send_queue_size=8)["merged"] > 0


@field(Communicator, "merge_rule", changed="mean")
def _what_several_count(given: Given) -> Any:
    # The mean of several equal gradients counts as one.
    found = _queue(given, send_queue_size=8, max_merge=8)
    assert found["merged"] > 0
    return found["weight"] == -10


@field(Communicator, "pull_every", changed=1000)
def _dense_values_come(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, model: Any) -> bool:
        push_ones(optimizer, model, 1)
        optimizer.flush("none")
        push_ones(optimizer, model, 1)
        return model.dense[0].item() < 0

    strategy = {"name": "async", "communicator": dict(given.fields)}
    return with_optimizer(strategy, see, variables=given.variables)


@field(Communicator, "wire_dtype", changed="int8")
@field(Communicator, "pull_dtype", plain="fp32", changed="bf16")
def _what_values_travel_as(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, model: Any) -> float:
        model.dense.grad = torch.full_like(model.dense, 1 / 3)
        optimizer.step()
        return float(model.dense[1].detach())

    strategy = {"name": "sync", "communicator": dict(given.fields)}
    return with_optimizer(strategy, see, variables=given.variables)


@field(Communicator, "learn_lookups", changed=False)
def _who_asks_for_rows(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, model: Any) -> int:
        for batch in batches_of(0, WATCHED + 1, count=2):
            before = optimizer.stats()["requests"]
            one_step(model, optimizer, batch)
        return int(optimizer.stats()["requests"] - before)

    strategy = {"name": "sync", "communicator": dict(given.fields)}
    two = functools.partial(Columns, 2)
    return with_optimizer(strategy, see, model=two, variables=given.variables)


@field(Communicator, "overlap", changed=False)
def _what_goes_before_its_push(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, model: Any) -> bool:
        model(torch.ones(1, 200)).sum().backward()
        optimizer.step()
        return optimizer.stats()["early_bytes"] > 0

    strategy = {"name": "sync", "communicator": dict(given.fields)}
    large = functools.partial(nn.Linear, 200, 200)  # 160 kB
    # One that stands for a network between hosts.
    network = _core.InprocNetwork(_core.FaultPlan(duplicate=1e-9, seed=1))
    return with_optimizer(
        strategy, see, model=large, variables=given.variables, network=network
    )


def _with_remote_table(
    given: Given,
    see: Callable[[Any, Any], Any],
    strategy: dict[str, Any] | None = None,
    **communicator: Any,
) -> Any:
    """What ``see`` finds in an optimizer and its remote table of 1000 rows."""
    with cpudist.remote_tables(names=["*"]):
        table = torch.nn.Embedding(1000, 2)

    def body(context: cpudist.Context) -> Any:
        made = strategy or {
            "name": "sync",
            "communicator": {**communicator, **given.fields},
        }
        return see(wrapped(table, made), table)

    return run(body, 1, variables=given.variables)[0]


def _train_rows(optimizer: cpudist.DistributedOptimizer, table: Any, ids: Any) -> None:
    optimizer.zero_grad()
    table(ids).square().sum().backward()
    optimizer.step()


@field(Communicator, "cache_bytes", changed=0)
def _what_rows_of_a_step_take(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, table: Any) -> bool:
        for begin in range(0, 1000, 100):
            table(torch.arange(begin, begin + 100))
        return optimizer.stats()["cache_dropped"] > 0

    return _with_remote_table(given, see)


@field(Communicator, "residue_bytes", changed=0)
def _what_is_kept_of_rounded_rows(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, table: Any) -> bool:
        for begin in range(0, 1000, 100):
            _train_rows(optimizer, table, torch.arange(begin, begin + 100))
        return optimizer.stats()["residues_dropped"] > 0

    return _with_remote_table(given, see, wire_dtype="int8")


@field(cpudist.Async, "max_staleness", changed=0)
def _how_late_gradients_are(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, model: Any) -> bool:
        push_ones(optimizer, model, 10)
        optimizer.flush()
        return optimizer.stats()["staleness"]["steps_max"] > 0

    queue = {"send_queue_size": 8, "max_merge": 1}
    strategy = {"name": "async", "communicator": queue, **given.fields}
    return with_optimizer(strategy, see, variables=given.variables, network=slow())


@field(cpudist.HalfAsync, "group", plain=((0, 1),), changed=((0,), (1,)), text="0;1")
def _who_shares_rounds(given: Given) -> Any:
    # The mean of two equal gradients counts once, those of two groups twice.
    def body(context: cpudist.Context) -> float:
        model = Counting()
        optimizer = wrapped(model, {"name": "half_async", **given.fields})
        push_ones(optimizer, model, 1)
        context.barrier()
        optimizer.flush()
        return model.dense[0].item()

    return run(body, 2, variables=dict(given.variables))


def _late_gradient(given: Given, **others: Any) -> float:
    """The weight after two gradients, of which the second missed the first."""
    both_have_read = threading.Barrier(2)
    first_is_applied = threading.Event()

    def body(context: cpudist.Context) -> float:
        model = Counting()
        compensation = given.with_fields(**others)
        strategy = {"name": "async", "delay_compensation": compensation}
        optimizer = wrapped(model, strategy)
        both_have_read.wait(PATIENCE_S)
        if context.trainer_rank == 1:
            first_is_applied.wait(PATIENCE_S)
        push_ones(optimizer, model, 1)
        optimizer.flush()
        first_is_applied.set()
        return model.dense[0].item()

    return float(run(body, 2, variables=dict(given.variables))[1])


@field(DelayCompensation, "factor", plain=0.25, changed=0.5)
@field(DelayCompensation, "adaptive", changed=True)
def _how_late_gradients_are_corrected(given: Given) -> Any:
    return _late_gradient(given)


@field(DelayCompensation, "momentum", changed=0.5)
@field(DelayCompensation, "epsilon", changed=0.5)
def _what_corrections_adapt_to(given: Given) -> Any:
    return _late_gradient(given, adaptive=True)


# -- Geo ---------------------------------------------------------------------------


class Wide(nn.Module):
    """A dense vector whose exchange is more than one slice."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(4_000_000))


def _exchanges(
    given: Given, steps: int, model: Any, pause_s: float, **others: Any
) -> int:
    """Pushes of the first of two trainers in so many steps."""

    def body(context: cpudist.Context) -> int:
        trained = model()
        strategy = {"name": "geo", **given.with_fields(**others)}
        optimizer = wrapped(trained, strategy, lr=0.1)
        client = context.trainer_client()
        before = client.stats()["requests"]
        if context.trainer_rank == 0:
            for _ in range(steps):
                push_ones(optimizer, trained, 1)
                time.sleep(pause_s)  # a thread of the core sends
        return client.stats()["requests"] - before

    return run(body, 2, variables=given.variables)[0]


@field(cpudist.Geo, "push_every", plain=100, changed=4)
def _how_often(given: Given) -> Any:
    return _exchanges(given, 99, Counting, 0.002, exchange_budget=1.0) > 0


@field(cpudist.Geo, "exchange_budget", plain=0.001, changed=1.0)
def _how_fast_an_exchange_is(given: Given) -> Any:
    # With all of a step's time one ends in a step or two, else in hundreds.
    return _exchanges(given, 30, Wide, 0.008, push_every=1) > 3


@field(cpudist.Geo, "cache_bytes", changed=0)
def _what_rows_may_take(given: Given) -> Any:
    def see(optimizer: cpudist.DistributedOptimizer, table: Any) -> bool:
        for begin in range(0, 1000, 100):
            _train_rows(optimizer, table, torch.arange(begin, begin + 100))
        return optimizer.stats()["exchange"]["retired_rows"] > 0

    return _with_remote_table(given, see, {"name": "geo", **given.fields})


@field(cpudist.Geo, "outer_step", changed=2.0)
def _how_far_servers_move(given: Given) -> Any:
    """A weight after the same step of two trainers, by its mean and by twice that."""

    def body(context: cpudist.Context) -> float:
        model = Counting()
        communicator = {"merge_rule": "mean"}
        fields = given.with_fields(communicator=communicator)
        optimizer = wrapped(model, {"name": "geo", **fields})
        push_ones(optimizer, model, 1)
        context.barrier()
        optimizer.flush()
        return model.dense[0].item()

    return run(body, 2, variables=given.variables)[0]


def _outer_steps(given: Given, **others: Any) -> float:
    """The weight after two outer steps on equal movements."""

    def body(context: cpudist.Context) -> float:
        model = Counting()
        strategy = {"name": "geo", "outer": given.with_fields(**others)}
        optimizer = wrapped(model, strategy)
        for _ in range(2):
            push_ones(optimizer, model, 1)
            context.barrier()
        return model.dense[0].item()

    return float(run(body, 1, 1, variables=dict(given.variables))[0])


@field(Outer, "lr", changed=0.5)
@field(Outer, "momentum", changed=0.5)
def _how_outer_steps_go(given: Given) -> Any:
    return _outer_steps(given)


@field(Outer, "nesterov", changed=True)
def _outer_steps_look_ahead(given: Given) -> Any:
    return _outer_steps(given, momentum=0.5)
