# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What two pages of a rank mean: figures for people. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch_cpudist.top.samples import Samples

PHASES = {
    "data": "cpudist_loop_data_seconds_total",
    "step()": "cpudist_step_seconds_total",
}
WAITS = ("round", "server", "collective")
_STALENESS = "cpudist_staleness_updates"


@dataclass(frozen=True)
class Moment:
    """A page, and when it was read.

    Attributes:
        at_s: of a monotonic clock.
        samples: what it has.
    """

    at_s: float
    samples: Samples


@dataclass(frozen=True)
class Trainer:
    """Of one trainer; what its page does not have is ``None`` or left out.

    Attributes:
        steps, samples, sent, received, rows: each per second; bytes with those of
            collectives, rows of tables that were pulled or pushed.
        phases: shares of a second, by ``PHASES``: waiting for batches in loops over
            datasets, and inside ``step()``.
        waits: shares of a second by whom was waited for, ``WAITS``; of forwards, too.
        staleness: updates, the bounds below which half and 99 % of the pushes lie.
        retries: requests that were repeated and links made anew, since ``init()``.
        lost: it has lost a server.
    """

    steps: float | None
    samples: float | None
    sent: float | None
    received: float | None
    rows: float | None
    phases: Mapping[str, float]
    waits: Mapping[str, float]
    staleness: tuple[float, float] | None
    retries: float
    lost: bool


@dataclass(frozen=True)
class Server:
    """Of one server; what its page does not have is ``None``.

    Attributes:
        rounds, pushes, sent, received: each per second.
        rows: of tables, that take memory.
        table_bytes, pending_bytes: memory of tables, and of pushes that wait.
        memory_bytes, cap_bytes: what its cap counts, and that; 0: none.
        lost: trainers.
    """

    rounds: float | None
    pushes: float | None
    sent: float | None
    received: float | None
    rows: float | None
    table_bytes: float | None
    pending_bytes: float | None
    memory_bytes: float | None
    cap_bytes: float
    lost: float


@dataclass(frozen=True)
class Figures:
    """Of one rank.

    Attributes:
        who: labels of its ``cpudist_rank_info``.
        seconds: that rates are of; 0 with its first page.
        trainer, server: what it is; ``None`` if it is none.
    """

    who: Mapping[str, str]
    seconds: float
    trainer: Trainer | None
    server: Server | None


class _Between:
    """What has happened between two pages."""

    def __init__(self, first: Moment, last: Moment) -> None:
        self.seconds = last.at_s - first.at_s
        self._first, self.last = first.samples, last.samples

    def rise(self, name: str, **labels: str) -> float | None:
        """By how much counters rose; one that fell has begun anew."""
        found = self.last.of(name, **labels)
        if not found:
            return None
        before = self._first.of(name, **labels)
        rise = 0.0
        for key, value in found.items():
            old = before.get(key, 0.0)
            rise += value - old if value >= old else value
        return rise

    def rate(self, name: str, **labels: str) -> float | None:
        """The same per second."""
        rise = self.rise(name, **labels)
        return None if rise is None or self.seconds <= 0 else rise / self.seconds


def figures(first: Moment, last: Moment) -> Figures:
    """What a rank does.

    Args:
        first: an earlier page of it, or the same.
        last: the newest one.
    """
    between = _Between(first, last)
    who = last.samples.who()
    trains = who.get("trainer", "-1") != "-1"
    serves = last.samples.has("cpudist_server_pushes_total")
    return Figures(
        who,
        between.seconds,
        _trainer(between) if trains else None,
        _server(between) if serves else None,
    )


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _trainer(between: _Between) -> Trainer:
    rate, last = between.rate, between.last
    # Loops over datasets count for themselves; step(samples=) may not be told.
    samples = rate("cpudist_samples_total") or rate("cpudist_loop_samples_total")
    sent = rate("cpudist_bytes_total", direction="sent")
    phases = {
        phase: value
        for phase, name in PHASES.items()
        if (value := rate(name)) is not None
    }
    waits = {
        "round": rate("cpudist_wait_seconds_total", of="round"),
        "server": rate("cpudist_wait_seconds_total", of="server"),
        "collective": rate("cpudist_collective_wait_seconds_total"),
    }
    retries = (
        last.total("cpudist_requests_resent_total"),
        last.total("cpudist_reconnects_total"),
    )
    return Trainer(
        steps=rate("cpudist_steps_total"),
        samples=samples,
        sent=_sum(sent, rate("cpudist_collective_sent_bytes_total")),
        received=rate("cpudist_bytes_total", direction="received"),
        rows=_sum(
            rate("cpudist_rows_total", how="pulled"),
            rate("cpudist_rows_total", how="pushed"),
        ),
        phases=phases,
        waits={name: value for name, value in waits.items() if value is not None},
        staleness=_staleness(between),
        retries=_sum(*retries) or 0.0,
        lost=bool(last.total("cpudist_server_lost")),
    )


def _staleness(between: _Between) -> tuple[float, float] | None:
    """Bounds of half and of 99 % of the pushes between the pages."""
    bounds: list[tuple[float, float]] = []
    for labels in between.last.of(f"{_STALENESS}_bucket"):
        try:
            bound = float(dict(labels)["le"])
        except (KeyError, ValueError):
            continue
        below = between.rise(f"{_STALENESS}_bucket", **dict(labels))
        bounds.append((bound, below or 0.0))
    bounds.sort()
    if not bounds or bounds[-1][1] <= 0:
        return None
    pushes = bounds[-1][1]
    half, most = (
        next(bound for bound, below in bounds if below >= share * pushes)
        for share in (0.5, 0.99)
    )
    return half, most


def _server(between: _Between) -> Server:
    rate, last = between.rate, between.last
    return Server(
        rounds=rate("cpudist_server_rounds_total"),
        pushes=rate("cpudist_server_pushes_total"),
        sent=rate("cpudist_server_bytes_total", direction="sent"),
        received=rate("cpudist_server_bytes_total", direction="received"),
        rows=last.total("cpudist_table_rows"),
        table_bytes=last.total("cpudist_table_bytes"),
        pending_bytes=last.total("cpudist_server_part_bytes", part="pushes"),
        memory_bytes=last.total("cpudist_server_memory_bytes"),
        cap_bytes=last.total("cpudist_server_memory_cap_bytes") or 0.0,
        lost=last.total("cpudist_server_trainers", state="lost") or 0.0,
    )
