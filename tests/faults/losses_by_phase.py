# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How long survivors take to be told of a loss: by kind of loss, layout and phase.

Takes many minutes, so that pytest collects it by its name only: ``scripts/test.sh
--long``, or by hand, with a table of what was measured at the end,

    CPUDIST_TEST_TRIALS=5 python -m pytest -s tests/faults/losses_by_phase.py

Losses of networks need the right to make network namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from endings import lose_rank
from loss_cases import KILLED_S, STOPPED_S, check_loss, make, step
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(4 * PATIENCE_S)]

TRIALS = int(os.environ.get("CPUDIST_TEST_TRIALS", "3"))
STRATEGIES = ("sync", "async")
PHASES = ("first step", "round", "flush", "state", "barrier", "shutdown", "snapshot")


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
# Trainers with dedicated servers wait for nobody in shutdown(): servers stay for who
# is left.
PLACES = [
    (who, phase)
    for who, layout in LAYOUTS.items()
    for phase in PHASES
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
    lost_s = time.monotonic()
    lose()
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


# -- networks ----------------------------------------------------------------------

ADDRESSES = ("10.78.0.1", "10.78.0.2")
NOBODY = "02:00:00:00:00:99"
NEW_NETWORK = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=PATIENCE_S, capture_output=True)


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces with a cable between them, which has these two ends."""

    names: tuple[str, str]
    ends: tuple[str, str]

    def pull_the_plug(self) -> None:
        """Nothing comes from the second host any more, no reset either."""
        ip("-n", self.names[1], "link", "set", self.ends[1], "down")

    def lose_what_goes(self, side: int) -> None:
        """What one host sends to the other goes to nobody; the way back is there."""
        ip("-n", self.names[side], "neighbour", "replace", ADDRESSES[1 - side],
           "lladdr", NOBODY, "dev", self.ends[side], "nud", "permanent")  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[Callable[[], Hosts]]:
    """Makes such hosts, which end with the test."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are not allowed: no program ip")
    with contextlib.ExitStack() as undo:
        made: list[Hosts] = []

        def make_hosts() -> Hosts:
            mark = f"{os.getpid() % 100000}{len(made)}"
            one = Hosts((f"cpudist-{mark}a", f"cpudist-{mark}b"),
                        (f"cpl{mark}a", f"cpl{mark}b"))  # fmt: skip
            for name in one.names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("link", "add", one.ends[0], "type", "veth", "peer", "name", one.ends[1])
            for name, end, address in zip(one.names, one.ends, ADDRESSES, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
            made.append(one)
            return one

        try:
            make_hosts()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not allowed: {error}")
        yield make_hosts


def enter(names: tuple[str, str], lost: int, rank: int) -> None:
    """Before a rank joins: who is to be lost is alone on the second host."""
    side = int(rank == lost)
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", names[side]).open() as file:
        if libc.setns(file.fileno(), NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["CPUDIST_BIND"] = ADDRESSES[side]


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
def test_a_lost_network(cut, who, strategy, phase, measured, hosts, tmp_path):
    layout = LAYOUTS[who]
    if cut == TO_THE_LOST:
        layout = replace(layout, names=r"(trainer|server) \d")
    for trial in range(TRIALS):
        apart = hosts()
        folder = str(tmp_path / f"snapshots-{trial}")
        body = functools.partial(into, strategy, phase, layout.idle_trainer(), folder)
        prepare = functools.partial(enter, apart.names, layout.lost)
        lose = functools.partial(CUTS[cut], apart)
        with start(layout, body, strategy, folder, prepare) as ranks:
            took_s = watch(ranks, layout, lose, STOPPED_S)
            measured.add(cut, phase, who, took_s)
