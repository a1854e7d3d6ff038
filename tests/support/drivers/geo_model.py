# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The algebra of Geo in plain Python, one number at a time.

A number is named by its parameter, its row (0 in dense parameters) and its place in the
row. Sections, of which a push and a reply consist, are the blocks of a dense parameter
and the rows of a table that one server owns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from torch_cpudist import _core
from torch_cpudist.tables.remote_weight import is_remote

Key = tuple[str, int]  # parameter, row
Rows = dict[Key, list[float]]


class Sections:
    """What lies where; as an open optimizer has placed it."""

    def __init__(self, opt: Any, servers: int) -> None:
        placement = opt.trained.placement
        self.servers = servers
        self.tables = [table.found.name for table in placement.tables]
        self._owners = {
            table.found.name: _core.owner_of_keys(
                range(table.found.weight.shape[0]),
                table=table.found.name,
                server_count=servers,
            )
            for table in placement.tables
        }
        self.blocks = [
            (
                spec.shard,
                placement.dense[spec.parameter].name,
                spec.offset,
                spec.elements,
            )
            for spec in placement.layout.blocks
        ]

    def split(self, touched: set[Key], dense: bool = True) -> list[list[Key]]:
        """All dense numbers and these rows, in sections, in the order of slices."""
        sections = []
        for server in range(self.servers):
            for shard, name, offset, elements in self.blocks:
                if dense and shard == server:
                    sections.append([(name, offset + i) for i in range(elements)])
            for name in self.tables:
                rows = [k for k in touched if k[0] == name]
                owned = [k for k in rows if self._owners[name][k[1]] == server]
                if owned:
                    sections.append(owned)
        return sections


@torch.no_grad()
def _values(
    model: torch.nn.Module, name: str, parameter: torch.nn.Parameter
) -> torch.Tensor:
    if not is_remote(parameter):
        return parameter.detach()
    module = model.get_submodule(name.rpartition(".")[0])
    keys = torch.arange(len(parameter))
    if not isinstance(module, torch.nn.EmbeddingBag):
        return module(keys)
    # One bag a row; a padding row counts in none.
    padding, module.padding_idx = module.padding_idx, None
    try:
        return module(keys.reshape(-1, 1))
    finally:
        module.padding_idx = padding


def rows_of(model: torch.nn.Module, tables: list[str]) -> Rows:
    """The numbers of a model; each one of a dense parameter is a row of its own."""
    found: Rows = {}
    for name, parameter in model.named_parameters():
        values = _values(model, name, parameter).double()
        rows = values if name in tables else values.reshape(-1, 1)
        found.update({(name, i): row for i, row in enumerate(rows.tolist())})
    return found


class Servers:
    """All servers together."""

    def __init__(self, values: Rows, sections: Sections, trainers: int) -> None:
        self.z = {key: list(row) for key, row in values.items()}
        self.sections = sections
        self.members = set(range(trainers))
        self.changed: dict[int, set[Key]] = {rank: set() for rank in range(trainers)}

    def push(self, rank: int, deltas: Rows) -> tuple[Rows, int]:
        """Adds a push; the reply and the number of members."""
        for key, delta in deltas.items():
            self.z[key] = [z + d for z, d in zip(self.z[key], delta, strict=True)]
            if key[0] in self.sections.tables:
                for other in self.changed.keys() - {rank}:
                    self.changed[other].add(key)
        dense = {k for k in self.z if k[0] not in self.sections.tables}
        reply = {k: list(self.z[k]) for k in dense | self.changed[rank]}
        self.changed[rank] = set()
        return reply, len(self.members)


class Trainer:
    """One trainer; each method is what its optimizer does.

    With ``step`` it hands on so many N-th parts of its movement and drops the rest;
    ``"root"`` is the square root of N in rows of tables, else 1. Without, it hands on
    one part and keeps the rest.
    """

    def __init__(
        self, rank: int, servers: Servers, step: float | str | None = None
    ) -> None:
        self.averages = step is not None
        self._step = step
        self.rank = rank
        self.servers = servers
        self.x = {key: list(row) for key, row in servers.z.items()}
        self._forget()
        self.touched: set[Key] = set()
        self.n = len(servers.members)
        self.slices: list[Any] = []
        self.outgoing: Rows = {}
        self.agreed: Rows = {}
        self.reply: Rows = {}
        self.phase = "idle"

    def _forget(self) -> None:
        tables = self.servers.sections.tables
        self.y = {k: list(row) for k, row in self.x.items() if k[0] not in tables}

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        self.servers.members.add(self.rank)
        for name, gradient in gradients.items():
            if gradient.is_sparse:
                summed: dict[Key, list[float]] = defaultdict(lambda: [0.0])
                pairs = zip(
                    gradient._indices()[0].tolist(),
                    gradient._values().tolist(),
                    strict=True,
                )
                for row, values in pairs:
                    before = summed.get((name, row), [0.0] * len(values))
                    both = zip(before, values, strict=True)
                    summed[name, row] = [a + b for a, b in both]
            else:
                flat = gradient.flatten().tolist()
                summed = {(name, i): [value] for i, value in enumerate(flat)}
            for key, values in summed.items():
                self.y.setdefault(key, list(self.x[key]))
                if gradient.is_sparse:
                    self.touched.add(key)
                both = zip(self.x[key], values, strict=True)
                self.x[key] = [x - g for x, g in both]

    def begin(self, whole: bool = False) -> None:
        assert self.phase == "idle"
        tables = self.servers.sections.tables
        keys, self.touched = self.touched, set()
        if whole:
            keys = {k for k in self.y if k[0] in tables and self.x[k] != self.y[k]}
        self.divisor = self._divisor(whole, rows=True)
        self.dense_divisor = self._divisor(whole, rows=False)
        self.whole = whole
        self.slices = self.servers.sections.split(keys)
        self.outgoing = {}
        self.agreed = {}
        self.phase = "pack"

    def _divisor(self, whole: bool, rows: bool) -> float:
        """Of how many parts of its movement it hands one on."""
        if self._step is None:
            return 1 if whole else self.n
        if self._step == "root":
            return math.sqrt(self.n) if rows else self.n
        return max(self.n / float(self._step), 1)

    def _divisor_of(self, key: Key) -> float:
        rows = key[0] in self.servers.sections.tables
        return self.divisor if rows else self.dense_divisor

    def value(self, key: Key) -> list[float]:
        """What a lookup gives."""
        return self.x[key]

    def advance(self) -> bool:
        """One slice, or one change of phase; whether the exchange is over."""
        if self.phase == "idle":
            return True
        if self.phase == "travel":
            own = self.servers.sections.split(set(self.agreed), dense=False)
            self.slices = [(self.agreed, keys) for keys in own]
            self.slices += [(self.reply, keys) for keys in self._sections_of_reply()]
            self.phase = "apply"
        elif self.slices and self.phase == "pack":
            self._pack(self.slices.pop(0))
        elif self.slices:
            self._apply(*self.slices.pop(0))
        elif self.phase == "pack":
            self.reply, self.members = self.servers.push(self.rank, self.outgoing)
            self.phase = "travel"
        else:
            if not self.whole:
                self.n = self.members
            self.phase = "idle"
        return self.phase == "idle"

    def _sections_of_reply(self) -> list[list[Key]]:
        tables = self.servers.sections.tables
        return self.servers.sections.split({k for k in self.reply if k[0] in tables})

    def _pack(self, keys: list[Key]) -> None:
        for key in keys:
            x, y = self.x[key], self.y[key]
            divisor = self._divisor_of(key)
            delta = [(a - b) / divisor for a, b in zip(x, y, strict=True)]
            moved = [b + d for b, d in zip(y, delta, strict=True)]
            self.y[key] = list(x) if divisor == 1 else moved
            self.outgoing[key] = delta
            if self.averages:
                # What the row is on the server if nobody else moves it.
                if key[0] in self.servers.sections.tables:
                    self.agreed[key] = list(self.y[key])
                self.y[key] = list(x)

    def _apply(self, values: Rows, keys: list[Key]) -> None:
        for key in keys:
            z = values[key]
            if key not in self.y:
                self.x[key] = list(z)
                continue
            triples = zip(self.x[key], z, self.y[key], strict=True)
            # Without movement of its own x is z, also where x + (z - y) is rounded.
            self.x[key] = [
                new if x == old else x + (new - old) for x, new, old in triples
            ]
            self.y[key] = list(z)

    def finish(self) -> None:
        while not self.advance():
            pass

    def exchange(self, whole: bool) -> None:
        self.finish()
        self.begin(whole)
        self.finish()

    def leave(self) -> None:
        if self.rank in self.servers.members:
            self.exchange(whole=True)
            self.servers.members.discard(self.rank)

    def flush(self) -> None:
        if self.rank in self.servers.members:
            self.exchange(whole=False)
            return
        self.x = {key: list(row) for key, row in self.servers.z.items()}
        self._forget()
        self.touched = set()


class SlotTrainer(Trainer):
    """One whose tables are remote: it has the rows that it has stepped, up to a cap.

    Above it a trainer that begins an exchange gives up those that were touched longest
    ago, of one interval those of the lowest numbers; what the servers lack of them goes
    whole, and they go when that is there and nothing has touched them since.
    """

    def __init__(
        self, rank: int, servers: Servers, step: float | str | None, cap: int
    ) -> None:
        super().__init__(rank, servers, step)
        self.cap = cap
        self.ages: dict[Key, int] = {}  # interval of the last touch, of rows it has
        self.interval = 1
        self.leaving: set[Key] = set()
        self.retired = 0

    def value(self, key: Key) -> list[float]:
        return self.x[key] if self._is_here(key) else self.servers.z[key]

    def _is_here(self, key: Key) -> bool:
        return key[0] not in self.servers.sections.tables or key in self.ages

    def step(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            rows = gradient._indices()[0].tolist() if gradient.is_sparse else []
            for row in rows:
                key = (name, row)
                if key not in self.ages:
                    self.x[key] = list(self.servers.z[key])
                self.ages[key] = self.interval
        super().step(gradients)

    def _size(self, key: Key) -> int:
        """Of two rows, one place in a half full table of 24 bytes, and a count."""
        return 8 * len(self.x[key]) + 4 + 48

    def _choose(self) -> None:
        excess = sum(map(self._size, self.ages)) - (self.cap - self.cap // 8)
        if sum(map(self._size, self.ages)) <= self.cap:
            return
        tables = self.servers.sections.tables
        old = [key for key, age in self.ages.items() if age != self.interval]
        order = sorted(old, key=lambda k: (self.ages[k], tables.index(k[0]), k[1]))
        for key in order:
            if excess <= 0:
                break
            self.leaving.add(key)
            excess -= self._size(key)
        self._free()

    def _free(self) -> None:
        for key in sorted(self.leaving):
            if self.ages[key] == self.interval or self.x[key] != self.y[key]:
                continue
            self.leaving.discard(key)
            del self.ages[key], self.y[key]
            self.retired += 1

    def begin(self, whole: bool = False) -> None:
        self.leaving = set()
        if not whole:
            self._choose()
            self.touched |= self.leaving
        super().begin(whole)
        self.interval += 1

    def _divisor_of(self, key: Key) -> float:
        leaves = key in self.leaving and not self.averages
        return 1 if leaves else super()._divisor_of(key)

    def _apply(self, values: Rows, keys: list[Key]) -> None:
        super()._apply(values, [key for key in keys if self._is_here(key)])

    def advance(self) -> bool:
        ended = self.phase == "apply" and not self.slices
        done = super().advance()
        if ended:
            self._free()
        return done

    def flush(self) -> None:
        if self.rank in self.servers.members:
            self.exchange(whole=False)
            return
        ages = dict.fromkeys(self.ages, 0)
        super().flush()
        self.ages, self.interval = ages, 1
        self.y.update({key: list(self.x[key]) for key in ages})
