# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long survivors take to be told of a loss: by kind of loss, layout and phase.

Takes many minutes, so that pytest collects it by its name only: ``scripts/test.sh
--long``, or by hand, with a table of what was measured at the end,

    CPUDIST_TEST_TRIALS=5 python -m pytest -s tests/faults/losses_by_phase.py

Losses of networks need the right to make network namespaces.
"""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from endings import lose_rank
from loss_cases import KILLED_S, STOPPED_S, check_loss, make, step
from network_hosts import Hosts, enter, make_hosts  # noqa: F401
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.launch import endpoints
from torch_cpudist.launch.rendezvous import Rendezvous
from torch_cpudist.testing import ProcessRanks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(4 * PATIENCE_S)]

TRIALS = int(os.environ.get("CPUDIST_TEST_TRIALS", "3"))
STRATEGIES = ("sync", "async")
INIT = "init"
PHASES = (
    INIT,
    "first step",
    "round",
    "flush",
    "state",
    "barrier",
    "shutdown",
    "snapshot",
)


@dataclass(frozen=True)
class Layout:
    """Who is there, and who of them is lost.

    Attributes:
        ranks: all, of which the first ``servers`` only serve.
        servers: dedicated ones; 0: every rank trains and serves.
        lost: the rank that is lost.
        names: a pattern of what it is called.
    """

    ranks: int
    servers: int
    lost: int
    names: str

    def idle_trainer(self) -> int | None:
        """Whoever is lost, if it trains: it stays out, so that the others wait."""
        return self.lost - self.servers if self.servers <= self.lost else None

    def watchers(self) -> list[int]:
        """The ranks that are to be told."""
        served = set(range(self.servers)) if self.lost < self.servers else set()
        return sorted(set(range(self.ranks)) - {self.lost} - served)


LAYOUTS = {
    "colocated rank": Layout(3, 0, 1, r"(trainer|server) 1\b"),
    "trainer, dedicated servers": Layout(4, 1, 3, r"trainer 2\b"),
    "dedicated server": Layout(4, 2, 0, r"server 0\b"),
}
# Those of init() have a test of their own. Trainers with dedicated servers wait for
# nobody in shutdown(): servers stay for who is left.
PLACES = [
    (who, phase)
    for who, layout in LAYOUTS.items()
    for phase in PHASES[1:]
    if phase != "shutdown" or not layout.servers
]


def into(
    strategy: str,
    phase: str,
    idle: int | None,
    folder: str,
    context: cpudist.Context,
    report: Any,
) -> None:
    """Trains up to a phase, and is in it until somebody is lost."""
    model, opt = make()
    if phase == "snapshot":
        opt.resume(folder)
    if phase != "first step":
        for _ in range(3):
            step(model, opt)
    report("there")
    if context.trainer_rank == idle:
        time.sleep(2 * PATIENCE_S)
    if phase == "shutdown":
        context.shutdown()
    while True:
        be_in(phase, strategy, model, opt, context)


def be_in(
    phase: str, strategy: str, model: Any, opt: Any, context: cpudist.Context
) -> None:
    """Once through what a phase is."""
    if phase == "flush":
        opt.flush()
    elif phase == "state":
        opt.state_dict()
    elif phase == "barrier":
        context.barrier()
    elif phase == "snapshot" and (strategy == "sync" or not context.trainer_rank):
        with contextlib.suppress(cpudist.SnapshotError):
            opt.save_snapshot()
    else:
        step(model, opt)


class Measured:
    """Seconds from a loss to the error of a survivor, for the tables of a page."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str, str], list[float]] = {}

    def add(self, loss: str, phase: str, who: str, seconds: list[float]) -> None:
        self.seconds.setdefault((loss, phase, who), []).extend(seconds)

    def cell(self, loss: str, phase: str, who: str) -> str:
        """Minimum, median, maximum, and of how many."""
        found = self.seconds.get((loss, phase, who))
        if not found:
            return "-"
        figures = (min(found), statistics.median(found), max(found))
        return ", ".join(f"{figure:.3f}" for figure in figures) + f" ({len(found)})"

    def lines(self) -> Iterator[str]:
        """A table for each kind of loss, with both strategies in each cell."""
        for loss in dict.fromkeys(key[0] for key in self.seconds):
            yield f"\n| {loss} | " + " | ".join(LAYOUTS) + " |"
            yield "|---" * (1 + len(LAYOUTS)) + "|"
            for phase in PHASES:
                cells = [self.cell(loss, phase, who) for who in LAYOUTS]
                yield f"| {phase} | " + " | ".join(cells) + " |"


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    made = Measured()
    yield made
    print("\nseconds: minimum, median, maximum (survivors)")
    print("\n".join(made.lines()))


def start(
    layout: Layout,
    body: Callable[..., None],
    strategy: str,
    folder: str,
    prepare: Callable[[int], None] | None = None,
) -> ProcessRanks:
    variables = {"CPUDIST_STRATEGY": strategy, "CPUDIST_SNAPSHOT_DIR": folder}
    return ProcessRanks(
        body,
        layout.ranks,
        servers=layout.servers,
        variables=variables,
        prepare=prepare,
    )


def watch(
    ranks: ProcessRanks,
    layout: Layout,
    lose: Callable[[], object],
    limit_s: float,
) -> list[float]:
    """Loses what is to be lost once all are there; the seconds of each survivor."""
    for rank in range(layout.servers, layout.ranks):
        ranks.expect(rank, "report", PATIENCE_S)
    for rank in range(layout.servers):
        ranks.expect(rank, "serving", PATIENCE_S)
    time.sleep(0.3)  # into the phase
    lose()
    # Beside ranks that never wait the command that cuts a network takes a while itself.
    lost_s = time.monotonic()
    took_s = []
    for rank in layout.watchers():
        entry = ranks.expect(rank, "error", PATIENCE_S)
        check_loss(entry, lost_s, limit_s, layout.names)
        took_s.append(entry["time_s"] - lost_s)
    return took_s


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("who", "phase"), PLACES)
@pytest.mark.parametrize(
    ("loss", "number", "limit_s"),
    [("killed", signal.SIGKILL, KILLED_S), ("frozen", signal.SIGSTOP, STOPPED_S)],
)
def test_a_lost_process(
    loss, number, limit_s, who, strategy, phase, measured, tmp_path
):
    layout = LAYOUTS[who]
    for trial in range(TRIALS):
        folder = str(tmp_path / f"snapshots-{trial}")
        body = functools.partial(into, strategy, phase, layout.idle_trainer(), folder)
        with start(layout, body, strategy, folder) as ranks:
            lose = functools.partial(lose_rank, ranks, layout.lost, number)
            measured.add(loss, phase, who, watch(ranks, layout, lose, limit_s))


# -- init(): all have come, and one of them gets no further ------------------------

_LISTENS = "/server/"  # where a server puts its addresses


def stop_in_init(lost: int, servers: int, folder: str, rank: int) -> None:
    """One that trains stops before it says hello, a server before it is known."""
    if rank != lost:
        return
    put = Rendezvous.put

    def stay(*_: Any, **__: Any) -> Any:
        Path(folder, "there").touch()
        threading.Event().wait()

    def putting(self: Rendezvous, key: str, value: Any) -> None:
        if _LISTENS in key:
            stay()
        put(self, key, value)

    if lost < servers:
        Rendezvous.put = putting  # type: ignore[method-assign]
    else:
        endpoints.connect = stay


def never(context: cpudist.Context, report: Any) -> None:
    raise AssertionError("init() has returned without one of its ranks")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("who", LAYOUTS)
def test_a_process_that_is_killed_in_init(
    who, strategy, measured, tmp_path, eventually
):
    layout = LAYOUTS[who]
    for trial in range(TRIALS):
        folder = tmp_path / f"trial-{trial}"
        folder.mkdir()
        prepare = functools.partial(
            stop_in_init, layout.lost, layout.servers, str(folder)
        )
        with start(layout, never, strategy, str(folder), prepare) as ranks:
            eventually((folder / "there").exists, PATIENCE_S, "a rank in init()")
            time.sleep(0.3)  # the others wait for it
            lost_s = time.monotonic()
            lose_rank(ranks, layout.lost, signal.SIGKILL)
            took_s = []
            for rank in set(range(layout.ranks)) - {layout.lost}:
                entry = ranks.expect(rank, "error", PATIENCE_S)
                assert entry["value"]["type"] == "PeerLostError", entry
                text = entry["value"]["text"]
                named = rf"rank {layout.lost}\b|{layout.names}"
                assert re.search(named, text), text
                took_s.append(entry["time_s"] - lost_s)
            assert max(took_s) <= KILLED_S, took_s
            measured.add("killed", INIT, who, took_s)


# -- networks ----------------------------------------------------------------------

# Who hears nobody has others named as lost, and what it says of them arrives.
TO_THE_LOST = "one way cut, to the lost"
CUTS: dict[str, Callable[[Hosts], None]] = {
    "host gone without a reset": Hosts.pull_the_plug,
    "one way cut, from the lost": functools.partial(Hosts.lose_what_goes, side=1),
    TO_THE_LOST: functools.partial(Hosts.lose_what_goes, side=0),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("who", "phase"), PLACES)
@pytest.mark.parametrize("cut", CUTS)
def test_a_lost_network(cut, who, strategy, phase, measured, make_hosts, tmp_path):
    layout = LAYOUTS[who]
    if cut == TO_THE_LOST:
        layout = replace(layout, names=r"(trainer|server) \d")
    for trial in range(TRIALS):
        apart = make_hosts()
        folder = str(tmp_path / f"snapshots-{trial}")
        body = functools.partial(into, strategy, phase, layout.idle_trainer(), folder)
        prepare = functools.partial(enter, apart.names, layout.lost)
        lose = functools.partial(CUTS[cut], apart)
        with start(layout, body, strategy, folder, prepare) as ranks:
            took_s = watch(ranks, layout, lose, STOPPED_S)
            measured.add(cut, phase, who, took_s)
