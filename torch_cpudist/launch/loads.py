# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How busy dedicated servers are, which nobody can ask while they serve."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from torch_cpudist.errors import AddressError, PeerLostError
from torch_cpudist.machine import busy

if TYPE_CHECKING:
    from torch_cpudist.launch.rendezvous import Rendezvous
    from torch_cpudist.launch.run import Run

# The past that is told of, in calls of ``tell``, and what is too short to say anything.
_CALLS, _LEAST_S = 4, 0.5
# A change that is worth telling.
_CHANGE = 0.05


def _key(rank: int) -> str:
    return f"load/{rank}"


class ServerLoad:
    """Tells trainers, through the store, how busy a server is. Not thread-safe.

    A thread is busy when it runs or waits for a core. One of them reads all requests
    of a server: where it is always busy, trainers wait, whatever cores there are.
    """

    def __init__(self, rendezvous: Rendezvous | None, rank: int) -> None:
        """Tells nothing yet.

        Args:
            rendezvous: where ranks met; ``None`` where nobody can be told.
            rank: of this server.
        """
        self._rendezvous = rendezvous
        self._rank = rank
        self._past: deque[tuple[float, dict[int, busy.Busy]]] = deque(maxlen=_CALLS)
        self._told = -1.0

    def tell(self) -> None:
        """Tells the load since the third call before this one, if it has changed.

        A store that has ended is no error here. Where the kernel does not count,
        nothing is told.
        """
        if self._rendezvous is None:
            return
        now, threads = time.monotonic(), busy.of_threads()
        self._past.append((now, threads))
        began, before = self._past[0]
        if not threads or now - began < _LEAST_S:
            return
        none = busy.Busy(0.0, 0.0)
        wanted_s = max(
            one.wanted_s - before.get(number, none).wanted_s
            for number, one in threads.items()
        )
        load = min(wanted_s / (now - began), 1.0)
        if abs(load - self._told) < _CHANGE:
            return
        self._told = load
        with contextlib.suppress(AddressError, PeerLostError):
            self._rendezvous.show(_key(self._rank), load)


def loads_of(run: Run) -> list[float]:
    """What the dedicated servers of a run have told last: busy shares of a thread.

    Empty where none has, as where trainers serve, or servers are in jobs of their own.
    Thread safety: the thread that trains. Cost: two requests per server to the store.
    """
    found: list[float] = []
    layout, rendezvous = run.layout, run.rendezvous
    if run.environment.apart is not None or layout.colocated or rendezvous is None:
        return found
    with contextlib.suppress(AddressError, PeerLostError):
        for rank in layout.servers:
            told = rendezvous.shown(_key(rank))
            if told is not None:
                found.append(float(told))
    return found
