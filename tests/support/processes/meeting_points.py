# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Meeting points of this process, and who asks there or at those of others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from patience import PATIENCE_S

from torch_cpudist import _core
from torch_cpudist.launch.meeting.board import Board
from torch_cpudist.launch.meeting.point import Bounds, MeetingPoint
from torch_cpudist.launch.meeting.store import Clocks, MeetingStore
from torch_cpudist.settings.jobs import SeparateJob

KEY = b"a key of at least thirty-two bytes"
OTHER = b"another key of at least thirty-two bytes"


def patient() -> float:
    """Time that one who asks has left: always enough."""
    return PATIENCE_S


def secret_of(key: bytes | None) -> _core.Secret | None:
    """A run's key, if it has one."""
    return None if key is None else _core.Secret(key)


def store_at(
    port: int,
    key: bytes | None = None,
    remaining_s: Callable[[], float] = patient,
    clocks: Clocks | None = None,
    host: str = "127.0.0.1",
) -> MeetingStore:
    """One who asks at a port of this host."""
    apart = SeparateJob("trainer", host, port, trainers=0, rejoin_s=0)
    return MeetingStore(apart, secret_of(key), remaining_s, clocks)


@contextlib.contextmanager
def kept(
    board: Board | None = None,
    key: bytes | None = None,
    bounds: Bounds | None = None,
    port: int = 0,
) -> Iterator[tuple[MeetingPoint, int]]:
    """A meeting point, and its port."""
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    port = listener.getsockname()[1]
    where = f"127.0.0.1:{port}"
    point = MeetingPoint(listener, where, board or Board(), secret_of(key), bounds)
    try:
        yield point, port
    finally:
        point.stop()


def refuses(point: MeetingPoint, number: int) -> bool:
    """Whether it comes to have refused so many."""
    until_s = time.monotonic() + PATIENCE_S
    while point.refused < number and time.monotonic() < until_s:
        time.sleep(0.002)
    return point.refused == number


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of somebody else, who answers each connection so, and then closes it.

    Those that come while one is answered wait, as at a process that is stopped.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_all() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                answer(connection)

    thread = threading.Thread(target=answer_all, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes who waits to accept
        listener.close()
        thread.join(PATIENCE_S)


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    connection.settimeout(PATIENCE_S)
    came = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            came += data
    return came
