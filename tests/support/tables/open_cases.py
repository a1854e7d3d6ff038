# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables of any key beside a dictionary that does by hand what servers promise.

Gradients are small whole numbers, which SGD scales by powers of two, so that every sum
is exact in whatever order: the dictionary has the servers' rows to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.launch.context import open_contexts
from torch_cpudist.tables.remote_weight import table_of

DIM = 4
LR = 0.25
#: Of all kinds: the ends of int64, both sides of 0, and what hashes look like.
KEYS = [
    *(0, 1, 2, -1, -2, 2**63 - 1, -(2**63), 2**62, -(2**62) - 1, 2**54, 40),
    *cpudist.hash_keys([f"word {i}" for i in range(9)]).tolist(),
]

Row = np.ndarray[Any, np.dtype[np.float32]]
#: Of one trainer and step: keys, and a whole number for each that is its gradient.
Push = tuple[Sequence[int], Sequence[float]]


def begun(weight: torch.Tensor, keys: Sequence[int], name: str = "weight") -> Row:
    """The rows that servers make for keys of a table of this name."""
    table = table_of(weight)
    spec = _core.TableSpec(
        name,
        table.rows,
        table.dim,
        remote=True,
        open=True,
        seed=table.seed_of(name),
        initial=table.program.steps,
        overrides=table.program.overrides,
    )
    given = np.array(keys, np.int64)
    made = np.empty((len(given), table.dim), np.float32)
    _core.initial_rows(spec, given.ctypes.data, len(given), made.ctypes.data)
    return made


def read(module: nn.Module, keys: Sequence[int] = KEYS) -> torch.Tensor:
    """What lookups without a gradient give."""
    ids = torch.tensor(keys)
    with torch.no_grad():
        if isinstance(module, nn.EmbeddingBag):
            offsets = torch.arange(len(ids) + int(module.include_last_offset))
            return module(ids, offsets).clone()
        return module(ids).clone()


def counted(name: str = "weight") -> dict[str, int]:
    """What the servers of this process's run say of a table, summed up."""
    found: dict[str, int] = {}
    servers = [c.server for c in list(open_contexts) if c.server is not None]
    for one in (one for server in servers for one in server.table_stats()):
        if one["name"] == name:
            for what in ("rows", "bytes", "created", "filtered", "unknown_reads"):
                found[what] = found.get(what, 0) + one[what]
    return found


def rows_by_server(name: str = "weight") -> list[int]:
    """Rows of a table on each server of this process's run."""
    servers = [c.server for c in list(open_contexts) if c.server is not None]
    return [
        one["rows"]
        for server in servers
        for one in server.table_stats()
        if one["name"] == name
    ]


def wrap(
    module: nn.Module, strategy: Any = None, **options: Any
) -> cpudist.DistributedOptimizer:
    """Its optimizer, SGD."""
    inner = torch.optim.SGD(module.parameters(), lr=LR)
    return cpudist.DistributedOptimizer(inner, module, strategy, **options)


def step(opt: cpudist.DistributedOptimizer, module: nn.Module, push: Push) -> None:
    """One step in which every key has the gradient that a push says, summed up."""
    keys, gradients = push
    opt.zero_grad()
    if keys:
        rows = module(torch.tensor(keys))
        (rows * torch.tensor(gradients)[:, None]).sum().backward()
    opt.step()


def pushes(steps: int, rank: int, size: int = 5, keys: int = len(KEYS)) -> list[Push]:
    """Random ones of a trainer, in which keys repeat."""
    made = np.random.default_rng([steps, rank])
    found: list[Push] = []
    for _ in range(steps):
        chosen = made.integers(0, keys, size)
        # Multiples of 12: means over up to four trainers are whole numbers.
        found.append(([KEYS[i] for i in chosen], (12.0 * made.integers(-3, 4, size))))
    return found


@dataclass
class Dictionary:
    """What servers have of one table.

    Attributes:
        begins: what the rows of keys begin with.
        counted: pushes with which a key gets its row.
        unseen_steps: rows go that had no update for so many; 0: none goes.
        min_count: of these, those with fewer updates; 0: all.
        rows, counts, last: of keys with a row, updates and the number of the last.
        seen: pushes of keys without a row.
    """

    begins: Callable[[int], Row]
    counted: int = 1
    unseen_steps: int = 0
    min_count: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    created: int = 0
    filtered: int = 0
    evicted: int = 0
    updates: int = 0

    def update(self, round_of: Sequence[Push]) -> None:
        """One round: the pushes of all trainers, by rank."""
        self.updates += 1
        sums: dict[int, float] = {}
        for keys, gradients in round_of:
            own: dict[int, float] = {}
            for key, gradient in zip(keys, gradients, strict=True):
                own[key] = own.get(key, 0.0) + float(gradient)
            for key, gradient in own.items():
                if not self._admitted(key):
                    self.filtered += 1
                    continue
                sums[key] = sums.get(key, 0.0) + gradient
        for key, gradient in sums.items():
            step = np.float32(LR * gradient / len(round_of))
            self.rows[key] = self.rows[key] - step
            self.counts[key] += 1
            self.last[key] = self.updates
        self._evict()

    def _admitted(self, key: int) -> bool:
        if key in self.rows:
            return True
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] < self.counted:
            return False
        self.rows[key], self.counts[key] = self.begins(key), 0
        self.created += 1
        return True

    def _evict(self) -> None:
        if not self.unseen_steps:
            return
        for key in list(self.rows):
            unseen = self.updates - self.last[key]
            few = not self.min_count or self.counts[key] < self.min_count
            if unseen >= self.unseen_steps and few:
                del self.rows[key], self.counts[key], self.last[key]
                self.seen.pop(key, None)
                self.evicted += 1

    def read(self, keys: Sequence[int] = KEYS, zeros: bool = False) -> torch.Tensor:
        """What lookups give."""
        found = []
        for key in keys:
            absent = np.zeros(DIM, np.float32) if zeros else self.begins(key)
            found.append(self.rows.get(key, absent))
        return torch.from_numpy(np.stack(found))


def dictionary_of(module: nn.Module, **rules: Any) -> Dictionary:
    """One whose rows begin as those of a module that is trained by itself."""
    weight: Any = module.weight
    known = dict(zip(KEYS, begun(weight, KEYS), strict=True))
    return Dictionary(lambda key: known[key].copy(), **rules)


def keys_trained(
    modules: Sequence[nn.Module], given: Sequence[Sequence[Push]], servers: int
) -> list[tuple[list[torch.Tensor], dict[str, int]]]:
    """What each trainer reads before and after its pushes, and the servers' counts."""

    def body(context: cpudist.Context) -> tuple[list[torch.Tensor], dict[str, int]]:
        module = modules[context.trainer_rank]
        opt = wrap(module)
        found = [read(module)]
        for push in given[context.trainer_rank]:
            step(opt, module, push)
            found.append(read(module))
        return found, opt.table_stats()["weight"]

    return run(body, len(modules), servers)


def assert_as_in(
    expected: Dictionary,
    given: Sequence[Sequence[Push]],
    results: Sequence[tuple[list[torch.Tensor], dict[str, int]]],
) -> None:
    """All trainers have read a dictionary's rows, at each round, and its counts."""
    for at, round_of in enumerate([None, *zip(*given, strict=True)]):
        if round_of is not None:
            expected.update(round_of)
        for found, _ in results:
            assert torch.equal(found[at], expected.read()), at
    for _, stats in results:
        assert stats["rows"] == len(expected.rows)
        for count in ("created", "filtered", "evicted"):
            assert stats[count] == getattr(expected, count), count
