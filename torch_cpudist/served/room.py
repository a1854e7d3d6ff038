# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether tables fit into memory, asked on all ranks before the first byte is sent.

By the formula of docs/strategies.md, as a lower bound: what is refused would not have
fitted. Rows that were never touched before (shadows, residues) are left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_cpudist import _core
from torch_cpudist.errors import (
    ConfigMismatchError,
    OperationTimeoutError,
    OutOfMemoryError,
)
from torch_cpudist.launch.rooms import room_of
from torch_cpudist.machine import memory
from torch_cpudist.model.placement import Placement
from torch_cpudist.rules.state_parts import state_parts
from torch_cpudist.served.state_layout import row_elements
from torch_cpudist.tables.remote_weight import is_remote, table_of

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

# Tables that need less in all are not asked for: every machine has as much.
SMALL_BYTES = 64 << 20
_FIRST_POLL_S = 0.005
_LAST_POLL_S = 0.2
_RECORD_BYTES = 16  # key, count, last seen
_ROUNDED_BYTES = 8  # records are a multiple of it
_INDEX_BYTES = 9  # of a record in the fullest index
_MARK_BYTES = 8
_LOCAL_BYTES = 16  # further marks, counts and marks of pulls of trainers that step


def _state_bytes(config: _core.OptimizerConfig | None, dim: int) -> int:
    parts = state_parts(config) if config is not None else []
    return 4 * sum(row_elements(part, dim) for part in parts)


@dataclass(frozen=True)
class Need:
    """What one table takes beside the weights that trainers have already.

    Attributes:
        name, rows: of the table.
        server_bytes: per row, on the server that has it.
        trainer_bytes: per row, on every trainer.
    """

    name: str
    rows: int
    server_bytes: int
    trainer_bytes: int


def needs(placement: Placement, steps_here: bool) -> list[Need]:
    """What each table takes.

    Args:
        placement: with the tables, what servers run and what trainers do.
        steps_here: trainers step tables and keep their state: Geo.
    """
    found = []
    for table, spec in zip(placement.tables, placement.layout.tables, strict=True):
        weight = table.found.weight
        remote = is_remote(weight)
        if is_remote(weight) and table_of(weight).values is None:
            continue  # rows come into being one by one, as they are trained
        served = _state_bytes(placement.layout.configs[spec.group], spec.dim)
        if placement.layout.average_decay:
            served += 4 * spec.dim
        record = _RECORD_BYTES + 4 * spec.dim + served
        record = -(-record // _ROUNDED_BYTES) * _ROUNDED_BYTES
        here = 0 if remote else _MARK_BYTES
        if steps_here and not remote:
            own = placement.rules[table.group]
            here += _LOCAL_BYTES + _state_bytes(own, spec.dim)
        found.append(Need(spec.name, spec.rows, record + _INDEX_BYTES, here))
    return found


@dataclass(frozen=True)
class Rank:
    """A rank that needs memory.

    Attributes:
        who: for messages.
        trainer, server: what it is; both if colocated.
        limits: what is left to it; empty where that is not known.
    """

    who: str
    trainer: bool
    server: bool
    limits: Sequence[memory.Limit]


def shortage(
    tables: Sequence[Need], ranks: Sequence[Rank], server_count: int
) -> str | None:
    """Says where tables do not fit; ``None`` if nowhere.

    Ranks that share a limit need their sum of it.

    Args:
        tables: what is to be held.
        ranks: all that are known of.
        server_count: between which rows are dealt.
    """
    on_server = sum(t.rows * t.server_bytes for t in tables) // server_count
    on_trainer = sum(t.rows * t.trainer_bytes for t in tables)
    needed: dict[str, int] = {}
    left: dict[str, int] = {}
    sharers: dict[str, list[str]] = {}
    what: dict[str, str] = {}
    for rank in ranks:
        own = rank.server * on_server + rank.trainer * on_trainer
        for limit in rank.limits:
            needed[limit.key] = needed.get(limit.key, 0) + own
            # Looked at one after the other: the most that anybody has seen.
            left[limit.key] = max(left.get(limit.key, 0), limit.free_bytes)
            sharers.setdefault(limit.key, []).append(rank.who)
            what[limit.key] = limit.what
    for key, bytes_needed in needed.items():
        if bytes_needed > left[key]:
            largest = max(tables, key=lambda t: t.rows * t.server_bytes)
            return _described(
                largest,
                len(tables) - 1,
                bytes_needed,
                left[key],
                what[key],
                ", ".join(sharers[key]),
            )
    return None


def _described(
    table: Need, others: int, needed: int, left: int, what: str, who: str
) -> str:
    beside = f" and {others} more" if others else ""
    return (
        f"table {table.name!r} of {table.rows} rows{beside} cannot be held: "
        f"{table.server_bytes} bytes per row on its server and {table.trainer_bytes} "
        f"on each trainer, beside its weight, are {needed} bytes for {who}; there are "
        f"{left} ({what}). Nothing was sent. Raise that limit, let servers be on more "
        "hosts (CPUDIST_SERVERS, or more nodes), or take fewer rows, a smaller dim or "
        "an optimizer with less state (cpudist.optim.RowWiseAdagrad, SGD): "
        "docs/strategies.md, Memory."
    )


class RoomCheck:
    """Compares what tables need with what is left on every rank. Collective.

    Trainers of one torchrun job tell trainer 0 through the store what they have left;
    it decides, and all raise the same. Trainers in jobs of their own look at
    themselves. Cost: nothing for small tables, else two values in the store per
    trainer.
    """

    def __init__(
        self, run: Run, name: str, placement: Placement, steps_here: bool
    ) -> None:
        """Looks at what is left, before anything is opened.

        Args:
            run: this trainer's.
            name: of the optimizer that is built, equal on all trainers.
            placement: what it trains.
            steps_here: see ``needs``.
        """
        self._run = run
        self._name = name
        self._tables = needs(placement, steps_here)
        servers, trainers = run.server_count, run.trainer_count
        total = sum(
            t.rows * (t.server_bytes + trainers * t.trainer_bytes) for t in self._tables
        )
        self._asked = total >= SMALL_BYTES and servers > 0
        self._limits = memory.limits() if self._asked else []

    def compare(self) -> None:
        """Returns if all fits; before the first value is sent.

        Raises:
            OutOfMemoryError: on all trainers; names table, rows, bytes and the limit.
            ConfigMismatchError, PeerLostError, OperationTimeoutError: a trainer does
                not come here.
        """
        if not self._asked:
            return
        run = self._run
        rendezvous = run.rendezvous
        alone = run.environment.apart is not None or rendezvous is None
        if alone or run.trainer_count == 1:
            text = self._decided({run.trainer_rank: self._limits})
        else:
            text = self._agreed()
        if text:
            raise OutOfMemoryError(text)

    def _agreed(self) -> str:
        run = self._run
        keys = [f"memory/{self._name}/{rank}" for rank in range(run.trainer_count)]
        decided = f"memory/{self._name}/decided"
        self._show(keys[run.trainer_rank], [one.as_json() for one in self._limits])
        if run.trainer_rank > 0:
            return str(self._wait(decided, "trainer 0"))
        found = {
            rank: [memory.Limit(**told) for told in self._wait(key, f"trainer {rank}")]
            for rank, key in enumerate(keys)
        }
        text = self._decided(found)
        self._show(decided, text)
        return text

    def _show(self, key: str, value: object) -> None:
        if self._run.rendezvous is not None:
            self._run.rendezvous.show(key, value)

    def _shown(self, key: str) -> Any:
        rendezvous = self._run.rendezvous
        return None if rendezvous is None else rendezvous.shown(key)

    def _wait(self, key: str, whom: str) -> Any:
        run = self._run
        limit_s = run.environment.round_deadline_ms / 1000
        until = time.monotonic() + limit_s
        pause_s = _FIRST_POLL_S
        while True:
            value = self._shown(key)
            if value is not None:
                return value
            run.trainer_client().check()  # a lost rank is named
            mismatch = self._shown(mismatch_key(self._name))
            if mismatch is not None:
                raise ConfigMismatchError(str(mismatch))
            if time.monotonic() > until:
                raise OperationTimeoutError(
                    f"{whom} did not wrap its optimizer within {limit_s:g} s "
                    "(CPUDIST_ROUND_DEADLINE_MS). Build the same ones, in the same "
                    "order, on all."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def _decided(self, trainers: Mapping[int, Sequence[memory.Limit]]) -> str:
        """Why it does not fit, else an empty text."""
        return (
            shortage(self._tables, self._ranks(trainers), self._run.server_count) or ""
        )

    def _ranks(self, trainers: Mapping[int, Sequence[memory.Limit]]) -> list[Rank]:
        run, layout = self._run, self._run.layout
        apart = run.environment.apart is not None
        found = []
        for number, limits in trainers.items():
            rank = run.rank if apart else layout.trainers[number]
            serves = not apart and rank in layout.servers
            who = f"trainer {number}"
            if serves:
                who += f" with server {layout.servers.index(rank)}"
            found.append(Rank(who, True, serves, limits))
        if apart or run.rendezvous is None:
            return found
        for shard, rank in enumerate(layout.servers):
            if rank not in layout.trainers:
                limits = room_of(run.rendezvous, rank)
                found.append(Rank(f"server {shard}", False, True, limits))
        return found


def mismatch_key(name: str) -> str:
    """Where the store has it if a trainer has opened something else than others."""
    return f"memory/{name}/mismatch"
