# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The end of the process while threads read.

A daemon thread that frees a tensor, or is within an operation of torch, when the
interpreter ends takes the process down with it: it waits for a lock that never comes,
and the C++ frames that are unwound in its place abort. So at exit readers are ended,
and daemon threads that read are given a moment to ask for their next batch, where they
stay until the process is gone.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Protocol
from weakref import WeakSet

_MOST_S = 2.0
_POLL_S = 0.005


class Ending(Protocol):
    """Has threads of its own."""

    def end_at_exit(self) -> None:
        """Ends them, and waits for them."""


class Leaving:
    """Whether this process ends, and which daemon threads read. Any thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins anew: in a fork, whose readers are its parent's."""
        self._leaves = False
        self._lock = threading.Lock()
        self._open: WeakSet[Ending] = WeakSet()
        self._readers: WeakSet[threading.Thread] = WeakSet()

    def follow(self, ending: Ending) -> None:
        """Has something ended at exit, if it is still there then."""
        self.stay()
        with self._lock:
            self._open.add(ending)

    def reads(self) -> None:
        """Notes that the calling thread reads, and will ask for more."""
        thread = threading.current_thread()
        if thread.daemon:
            self._readers.add(thread)

    def has_read(self) -> None:
        """Notes that it will not."""
        self._readers.discard(threading.current_thread())

    def stay(self) -> None:
        """Keeps a daemon thread for ever once the process ends; else returns."""
        if self._leaves and threading.current_thread().daemon:
            self.has_read()
            threading.Event().wait()

    def leave(self) -> None:
        """Ends what reads, and waits for those that read, for 2 s at most."""
        self._leaves = True
        with self._lock:
            ending = list(self._open)
        for one in ending:
            one.end_at_exit()
        deadline = time.monotonic() + _MOST_S
        while time.monotonic() < deadline and any(
            thread.is_alive() for thread in list(self._readers)
        ):
            time.sleep(_POLL_S)


leaving = Leaving()
atexit.register(leaving.leave)
os.register_at_fork(after_in_child=leaving.forget)
