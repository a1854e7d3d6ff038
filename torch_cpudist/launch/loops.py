# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What loops over datasets have done in a run, for whoever shows it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Counters = Mapping[str, float]


class Loops:
    """Counters of all loops of one run, ended ones and those that are under way.

    Thread safety: all methods.
    """

    def __init__(self) -> None:
        """There was none."""
        self._lock = threading.Lock()
        self._ended: dict[str, float] = {}
        self._running: list[Callable[[], Counters]] = []

    @contextmanager
    def running(self, read: Callable[[], Counters]) -> Iterator[None]:
        """While it is entered a loop is under way.

        Args:
            read: its counters, which never fall; called from any thread.
        """
        with self._lock:
            self._running.append(read)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(read)
                self._ended = _sum(self._ended, read())

    def totals(self) -> dict[str, float]:
        """Sums over all loops; empty if there was none."""
        with self._lock:
            found = self._ended
            for read in self._running:
                found = _sum(found, read())
            return dict(found)


def _sum(one: Counters, other: Counters) -> dict[str, float]:
    return {name: one.get(name, 0) + value for name, value in other.items()}
