# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``lookups``: its link, and what its rows run."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from patience import PATIENCE_S

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from delayed import Link
from peers.cpudist_rank import strategy_of

DELAY_S = 0.01
LEFT, RIGHT, OTHER = b"left--", b"right-", b"other-"


def pairs(count: int) -> list[tuple[socket.socket, socket.socket]]:
    """Ends of hosts, and those that the link has; each message is a frame."""
    made = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(count)]
    for one in made:
        for end in one:
            end.setblocking(False)
    return made


def received(link: Link, end: socket.socket) -> bytes:
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit:
        try:
            return end.recv(100)
        except BlockingIOError:
            link.pass_frames()
    raise TimeoutError


def test_a_link_delays_frames_and_learns_where_hosts_are() -> None:
    ends = pairs(3)
    link = Link([inner.fileno() for _, inner in ends], DELAY_S)
    left, right, other = (outer for outer, _ in ends)
    began = time.perf_counter()
    left.send(RIGHT + LEFT + b"first")
    # Where nobody is known to be, it goes to all others.
    for end in (right, other):
        assert received(link, end) == RIGHT + LEFT + b"first"
    assert time.perf_counter() - began >= DELAY_S
    right.send(LEFT + RIGHT + b"second")
    other.send(LEFT + OTHER + b"third")
    assert received(link, left) == LEFT + RIGHT + b"second"
    assert received(link, left) == LEFT + OTHER + b"third"
    left.send(RIGHT + LEFT + b"fourth")
    assert received(link, right) == RIGHT + LEFT + b"fourth"
    for end in (left, other):
        try:
            raise AssertionError(end.recv(100))
        except BlockingIOError:
            pass
    for one in ends:
        for end in one:
            end.close()


def test_rows_say_who_asks() -> None:
    for text, learns in (("true", True), ("false", False)):
        strategy, _ = strategy_of(f"async:learn_lookups={text}")
        assert strategy.learns_lookups == learns
