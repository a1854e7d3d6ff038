# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tells the log who came to this rank's server without the run's key."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch_cpudist import _core
from torch_cpudist.errors import ClosedError
from torch_cpudist.log import logger

_WAIT_S = 3600.0  # stop() ends it
_PAUSE_S = 1.0
_STOP_S = 5.0  # a log may be slow, and is no reason to stay
_LINES = 4


class RefusalLog:
    """A thread that logs what a server has refused, a few lines a second at most.

    Only a server with a key has one: without, nobody is asked for anything.

    Thread safety: any thread.
    """

    def __init__(self, server: _core.Server, who: str) -> None:
        """Starts the thread; ``stop`` after the server's ends it."""
        self._server = server
        self._who = who
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="cpudist-refusals", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Waits for the thread, whose server was stopped, but not long. Idempotent."""
        self._stopping.set()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                found = self._server.take_refusals(_WAIT_S)
            except ClosedError:
                return
            log_refusals(self._who, *found)
            self._stopping.wait(_PAUSE_S)


def log_refusals(who: str, newest: Sequence[tuple[str, str]], count: int) -> None:
    """Warns of connections that were refused.

    Args:
        who: has refused them.
        newest: address and reason of some; the last ones are named.
        count: of all.
    """
    named = newest[-_LINES:]
    for address, reason in named:
        logger.warning("%s refused a connection from %s: %s", who, address, reason)
    if count > len(named):
        logger.warning("%s refused %d more just now", who, count - len(named))
