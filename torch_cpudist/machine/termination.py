# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Notices SIGTERM at once, whatever the main thread does, and ends the process in time.

Python calls handlers in its main thread, between two bytecodes: one that waits in C for
a frozen peer would never come to it. So a thread waits for the byte that Python's own
handler in C writes to a pipe; the handler in Python does nothing that can wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

_BYTES = 64
# Of no signal: the thread that reads it ends.
_OVER = b"\xff"
# Longer than a signal to oneself takes that no thread has blocked.
_DELIVERED_S = 1.0


class Termination:
    """SIGTERM of this process, from ``install`` to ``remove``.

    Thread safety: ``install`` from the main thread, else any. Cost: a thread that
    waits, and a pipe.

    Attributes:
        asked: SIGTERM has come; the process ends within the grace, whatever happens.
    """

    def __init__(
        self, grace_s: float, noticed: Callable[[], None], over: Callable[[], bool]
    ) -> None:
        """Changes nothing yet.

        Args:
            grace_s: for how long the process lives on after SIGTERM, in seconds.
            noticed: called in a thread of its own when it has come, once.
            over: whether another one may take its place, as nobody needs this.
        """
        self.asked = False
        self._grace_s = grace_s
        self._noticed = noticed
        self._over = over
        self._reads = self._writes = -1
        self._thread: threading.Thread | None = None

    def install(self) -> bool:
        """Begins to notice, where nobody else does and this is the main thread.

        Returns:
            Whether it has. Else all is as before: who has a handler decides.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        if _current and _current[0]._over():
            _current[0].remove()  # of a run that was ended by another thread
        if not is_free(signal.getsignal(signal.SIGTERM)):
            return False
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reads)
            os.close(writes)
            return False
        self._reads, self._writes = reads, writes
        _current[:] = [self]  # before anything else forks
        self._thread = threading.Thread(
            target=self._watch, name="cpudist-sigterm", daemon=True
        )
        self._thread.start()
        signal.signal(signal.SIGTERM, self._handle)
        # Calls of C libraries that wait go on: they may know no interruption.
        signal.siginterrupt(signal.SIGTERM, False)
        return True

    def remove(self) -> None:
        """Notices no more, unless it was asked already. Idempotent.

        Called by another thread than the main one it leaves all in place: SIGTERM ends
        the process at once then.
        """
        main = threading.current_thread() is threading.main_thread()
        if self._thread is None or self.asked or not main:
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        others = signal.set_wakeup_fd(-1)
        if others not in (-1, self._writes):
            signal.set_wakeup_fd(others)
        thread, self._thread = self._thread, None
        writes, self._writes = self._writes, -1
        # Not by the end of the pipe: a child may have been forked with it.
        with contextlib.suppress(BlockingIOError):
            os.write(writes, _OVER)
        os.close(writes)
        thread.join(_DELIVERED_S)
        if not thread.is_alive():
            os.close(self._reads)
        if _current == [self]:
            _current.clear()

    def forget(self) -> None:
        """In a forked child: SIGTERM ends that, and is no news to the parent."""
        with contextlib.suppress(ValueError):  # no main thread
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            others = signal.set_wakeup_fd(-1)
            if others not in (-1, self._writes):
                signal.set_wakeup_fd(others)
        self._thread = None
        for file in (self._reads, self._writes):
            if file != -1:
                os.close(file)
        # Whoever puts the handler back there has one that ends the process.
        self._reads = self._writes = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, now or when it comes to it."""
        if self._writes == -1:
            self.end()  # somebody who has called it since has put it back
        if not self._decides():
            return
        # Where others have taken Python's own wake-up. A full pipe is news enough.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writes, bytes([number]))

    @property
    def removed(self) -> bool:
        """Whether it notices nothing: not installed, or no more."""
        return self._thread is None

    def _decides(self) -> bool:
        """Whether nobody has set a handler since, who may call this one."""
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _watch(self) -> None:
        # Python writes the byte whoever's handler it will call.
        while not (
            signal.SIGTERM in (found := os.read(self._reads, _BYTES))
            and self._decides()
        ):
            if not found or _OVER in found:
                return
        self.asked = True
        timer = threading.Timer(self._grace_s, self.end)
        timer.daemon = True
        timer.start()
        self._noticed()

    def end(self) -> None:
        """Ends the process as SIGTERM does where nobody handles it."""
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal(signal.SIGTERM, None)  # SIG_DFL; Python lets its main thread only
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_DELIVERED_S)
        os._exit(128 + signal.SIGTERM)  # every thread has blocked it


def is_free(handler: object) -> bool:
    """Whether a handler of SIGTERM ends the process at once, as where there is none.

    That of a run that is over does so too: who had it saved during the run, as
    Lightning's ``Trainer`` does, puts it back after its end.
    """
    owner = getattr(handler, "__self__", None)
    over = isinstance(owner, Termination) and owner.removed
    return handler is signal.SIG_DFL or over


# The one of this process, if there is one.
_current: list[Termination] = []


def _after_fork_in_child() -> None:
    if _current:
        _current.pop().forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
