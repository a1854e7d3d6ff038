# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Shows the words of a board to whoever comes to a port: server 0's part of a meeting.

One thread, which waits for nobody: a visitor says hello, makes one request, has its
answer and is gone, within a few seconds, and only so many are there at a time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field

from torch_cpudist import _core
from torch_cpudist.errors import Error
from torch_cpudist.launch.meeting.board import Board
from torch_cpudist.launch.meeting.visitor import House, Visitor
from torch_cpudist.log import logger

_VISITORS_MAX = 64
_VISITORS_MIN = 4
_VISIT_S = 2.0
_WARN_EVERY_S = 60.0
# After what may pass: no descriptor, no memory.
_PAUSE_S = 0.1
_STOP_S = 5.0  # it may be at a log that is slow


def _visitors() -> int:
    """As many at a time, which leaves descriptors for others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _VISITORS_MAX
    return max(_VISITORS_MIN, min(_VISITORS_MAX, soft // 4))


@dataclass(frozen=True)
class Bounds:
    """What visitors may take.

    Attributes:
        visitors: at a time; the oldest goes for a new one.
        visit_s: for all that one says and hears.
    """

    visitors: int = field(default_factory=_visitors)
    visit_s: float = _VISIT_S


class MeetingPoint:
    """A board that others read and write. Thread safety: any thread.

    Attributes:
        refused: how many have not proven the run's key.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        board: Board,
        secret: _core.Secret | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """Begins to answer; ``stop`` ends it.

        Args:
            listener: where they come; this object's from now on.
            address: that all meet at, as they are told it.
            board: the words; its thread's from now on.
            secret: who has not got it may do nothing.
            bounds: what visitors may take.
        """
        self.refused = 0
        self._listener = listener
        self._listener.setblocking(False)
        self._where = address
        self._bounds = bounds or Bounds()
        self._house = House(board, secret, address, secrets.token_hex(8), self._refuse)
        # In the order in which they have come, so in that of their ends.
        self._visitors: dict[socket.socket, Visitor] = {}
        self._warned_s = float("-inf")
        self._stopping = False
        self._bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        _open.add(self)
        self._thread = threading.Thread(
            target=self._run, name="cpudist-meeting", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ends it; the port is free. Idempotent."""
        _open.discard(self)
        self._stopping = True
        with contextlib.suppress(OSError):  # there is a bell already, or it has ended
            self._ring.send(b".")
        self._thread.join(_STOP_S)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Closes all of them, also in a forked child, where the thread is not."""
        for connection in list(self._visitors):
            connection.close()
        for one in (self._listener, self._bell, self._ring, self._selector):
            one.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:  # of one who came; it ends nothing for others
                if self._stopping:
                    return
                logger.debug("the meeting point goes on after %r", error)
                time.sleep(_PAUSE_S)

    def _turn(self) -> None:
        """Waits until somebody comes, goes on or is late, and sees to it."""
        comes = False
        for key, _ in self._selector.select(self._next_s()):
            if key.fileobj is self._listener:
                comes = True
            elif isinstance(key.fileobj, socket.socket):
                self._go_on(key.fileobj)
        now_s = time.monotonic()
        for connection, visitor in list(self._visitors.items()):
            if visitor.until_s > now_s:
                break
            self._part_with(connection)
        # Last: what keeps it from taking another one in keeps nobody who is in.
        if comes:
            self._welcome()

    def _next_s(self) -> float | None:
        first = next(iter(self._visitors.values()), None)
        return None if first is None else max(0.0, first.until_s - time.monotonic())

    def _welcome(self) -> None:
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        if len(self._visitors) >= self._bounds.visitors:
            self._part_with(next(iter(self._visitors)))
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            until_s = time.monotonic() + self._bounds.visit_s
            who = f"{address[0]}:{address[1]}"
            visitor = Visitor(connection, who, until_s, self._house)
            self._selector.register(connection, selectors.EVENT_READ)
            self._visitors[connection] = visitor
        except BaseException:
            self._forget(connection)
            raise

    def _go_on(self, connection: socket.socket) -> None:
        visitor = self._visitors.get(connection)
        if visitor is None:  # it is the bell
            return
        try:
            if visitor.turn():
                self._part_with(connection)
                return
            writes = selectors.EVENT_WRITE if visitor.writes else selectors.EVENT_READ
            self._selector.modify(connection, writes)
        except (Error, OSError):
            self._part_with(connection)
        except BaseException:
            self._part_with(connection)
            raise

    def _part_with(self, connection: socket.socket) -> None:
        self._forget(connection)
        self._visitors.pop(connection, None)

    def _forget(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it may not have got there
            self._selector.unregister(connection)
        connection.close()

    def _refuse(self, who: str, why: str) -> None:
        self.refused += 1
        now_s = time.monotonic()
        if now_s - self._warned_s < _WARN_EVERY_S:
            return
        self._warned_s = now_s
        logger.warning(
            "the meeting point at %s refused %s: %s. It has refused %d so far, and "
            "says so once a minute at most.",
            self._where,
            who,
            why,
            self.refused,
        )


_open: weakref.WeakSet[MeetingPoint] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for point in list(_open):
        point.close_sockets()


os.register_at_fork(after_in_child=_after_fork_in_child)
