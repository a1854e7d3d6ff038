# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who is at a page of metrics now, and who goes when others come and it is full."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MOST = 8
_PATIENT_S = 1.0


@dataclass
class _Visit:
    """One connection: whose, since when, and whether it has said what it wants."""

    host: str
    since_s: float
    asked: bool = False


class Visitors:
    """Those that are there, so many at most. Thread safety: all methods.

    Args:
        cut: ends a connection; it may be closed by then.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        cut: Callable[[socket.socket], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See the class."""
        self._cut, self._clock = cut, clock
        self._lock = threading.Lock()
        self._there: dict[socket.socket, _Visit] = {}  # oldest first

    def come(self, connection: socket.socket, host: str) -> bool:
        """Whether there is room, for which another one may have had to go.

        That is the oldest of those that have asked for nothing yet, from the host that
        has most of them; without such the oldest, if it has been there for a second.

        Args:
            connection: the one that comes.
            host: from where.
        """
        gone = None
        with self._lock:
            if len(self._there) >= MOST:
                gone = self._least()
                if gone is None:
                    return False
                del self._there[gone]
            self._there[connection] = _Visit(host, self._clock())
        if gone is not None:
            self._cut(gone)
        return True

    def _least(self) -> socket.socket | None:
        """Who goes first."""
        silent = [(one, v) for one, v in self._there.items() if not v.asked]
        if silent:
            hosts = Counter(visit.host for _, visit in silent)
            most = max(hosts.values())
            return next(one for one, v in silent if hosts[v.host] == most)
        oldest, visit = next(iter(self._there.items()))
        return oldest if self._clock() - visit.since_s >= _PATIENT_S else None

    def asked(self, connection: socket.socket) -> None:
        """It has said what it wants."""
        with self._lock:
            visit = self._there.get(connection)
            if visit is not None:
                visit.asked = True

    def go(self, connection: socket.socket) -> None:
        """It is over. Idempotent."""
        with self._lock:
            self._there.pop(connection, None)
