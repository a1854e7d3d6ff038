# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Strangers of every kind, each with a pace: who come, and go when they are refused."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from strangers import frames
from strangers.frames import Target

WORDS = (b"GET / HTTP/1.1\r\n\r\n", bytes(64), bytes(range(256)) * 20)
# How often somebody comes. What they take of the processor is taken from the job where
# both have the same cores: figures name it.
ARRIVALS_PER_S = 50.0
# Of those that hold links open, until they have as many as they may.
HELD_PER_S = 500.0
_NICE = 19
# What it missed for longer it does not make up for all at once.
_LATE_S = 0.02
# The same windows and the same thread: how much they differ by themselves.
NOBODY = "nobody"
STAY = ("idle", "half a frame")


@dataclass
class Visits:
    """What became of strangers.

    Attributes:
        made: how many came.
        refused: of whom were told so, or had their link closed.
        most_open: links that were open at a time.
        cpu_s: their own processor time.
    """

    made: int = 0
    refused: int = 0
    most_open: int = 0
    cpu_s: float = 0.0


class HeldLinks:
    """Links that stay open: what it costs to watch them is what happens there."""

    def __init__(self) -> None:
        self._links: dict[int, socket.socket] = {}
        self._events = select.epoll()

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: socket.socket) -> None:
        """Holds it."""
        self._links[link.fileno()] = link
        self._events.register(link, select.EPOLLIN)

    def let_go(self) -> int:
        """Those that the job has closed, or refused: how many."""
        ended = self._events.poll(0)
        for number, _ in ended:
            self._links.pop(number).close()
        return len(ended)

    def close(self) -> None:
        """All of them."""
        for link in self._links.values():
            link.close()
        self._events.close()


@dataclass
class Visitors:
    """One kind of them, at work in a thread.

    Attributes:
        targets: servers, in turns.
        key: the job's, for whoever repeats what its owner has said.
        held: how many links may be open at a time, of those that are held open.
    """

    targets: list[Target]
    key: bytes
    held: int
    visits: Visits = field(default_factory=Visits)

    def run(self, kind: str, done: threading.Event) -> None:
        """Until it is done, at a steady pace.

        Strangers come from other machines; this thread yields the cores to the job, so
        that what slows the job is what its servers and the kernel have to do.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        began_s = time.thread_time()
        open_links = HeldLinks()
        visit = KINDS[kind]
        pause_s = 1 / (HELD_PER_S if kind in STAY else ARRIVALS_PER_S)
        due = time.monotonic()
        while not done.is_set():
            target = self.targets[self.visits.made % len(self.targets)]
            if kind not in STAY or len(open_links) < self.held:
                with contextlib.suppress(OSError):  # nobody lets it in just now
                    visit(self, target, open_links)
                self.visits.made += kind != NOBODY
            self.visits.most_open = max(self.visits.most_open, len(open_links))
            self.visits.refused += open_links.let_go()
            due = max(due + pause_s, time.monotonic() - _LATE_S)
            done.wait(max(due - time.monotonic(), 0))
        open_links.close()
        self.visits.cpu_s += time.thread_time() - began_s

    def end(self, link: socket.socket) -> None:
        """Counts what the listener says to who has said all."""
        self.visits.refused += frames.is_refused(link)


def _scan(who: Visitors, to: Target, _: HeldLinks) -> None:
    with to.connect() as link:
        link.sendall(WORDS[who.visits.made % len(WORDS)])
        link.shutdown(socket.SHUT_WR)
        who.end(link)


def _prove_wrongly(who: Visitors, to: Target, _: HeldLinks) -> None:
    nonce = frames.fresh_nonce()
    with to.connect() as link:
        link.sendall(frames.challenge(to, nonce))
        answered, _mac = frames.answer(link)
        link.sendall(
            frames.proof(to, b"another key of thirty-two bytes!", nonce, answered)
        )
        who.end(link)


def _repeat(who: Visitors, to: Target, _: HeldLinks) -> None:
    """What the owner of the key has said on another link, word for word."""
    nonce = frames.fresh_nonce()
    first = frames.challenge(to, nonce)
    with to.connect() as link:
        link.sendall(first)
        answered, _mac = frames.answer(link)
    last = frames.proof(to, who.key, nonce, answered)
    with to.connect() as link:
        link.sendall(first)
        frames.answer(link)
        link.sendall(last)
        who.end(link)


def _reflect(who: Visitors, to: Target, _: HeldLinks) -> None:
    """The server's own proof and nonce, in the place of one's own."""
    with to.connect() as link:
        link.sendall(frames.challenge(to, frames.fresh_nonce()))
        nonce, mac = frames.answer(link)
        if who.visits.made % 2:
            link.sendall(frames.auth(to, frames.PROOF, frames.NOTHING, mac))
            return who.end(link)
    with to.connect() as link:
        link.sendall(frames.challenge(to, nonce))
        frames.answer(link)
        link.sendall(frames.auth(to, frames.PROOF, frames.NOTHING, mac))
        who.end(link)


def _stay(_: Visitors, to: Target, links: HeldLinks) -> None:
    links.add(to.connect())


def _begin(_: Visitors, to: Target, links: HeldLinks) -> None:
    """Half of a frame."""
    link = to.connect()
    links.add(link)
    link.sendall(frames.challenge(to, frames.fresh_nonce())[:100])


def _stay_away(_: Visitors, to: Target, links: HeldLinks) -> None:
    """Costs what the thread costs."""


KINDS: dict[str, Callable[[Visitors, Target, HeldLinks], None]] = {
    NOBODY: _stay_away,
    "scanner": _scan,
    "wrong key": _prove_wrongly,
    "replay": _repeat,
    "reflection": _reflect,
    "idle": _stay,
    "half a frame": _begin,
}
