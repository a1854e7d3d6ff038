# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A lock that many hold together, or one alone."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from torch_cpudist.errors import OperationTimeoutError

# Who wants it alone holds new ones back for so long at first, and at most.
_HOLD_S = 0.1
_LONGEST_HOLD_S = 2.0
# How often one looks for shares whose call has ended without a word.
_LOOK_S = 0.05


class _Thread:
    """How many shares a thread has taken that nobody has left yet."""

    def __init__(self) -> None:
        self.depth = 0


class Share:
    """What ``SharedLock.enter`` gives, and ``leave`` takes.

    Attributes:
        frame: of the call that it is for; ``None`` for one that always leaves.
    """

    __slots__ = ("_epoch", "_held", "_thread", "frame")

    def __init__(self, thread: _Thread, frame: FrameType | None) -> None:
        self.frame = frame
        self._thread = thread
        self._epoch = 0
        self._held = False

    @property
    def held(self) -> bool:
        """Whether nobody has left it."""
        return self._held

    @property
    def ended(self) -> bool:
        """Whether its call is over, by whatever ended it."""
        frame = self.frame
        if frame is None:
            return False
        try:
            # Refused for a frame that runs or waits for what it has called.
            frame.clear()
        except RuntimeError:
            return False
        return True


class SharedLock:
    """Whoever wants it alone waits for those who share it, and holds new ones back.

    He does so for a tenth of a second. Where others share it for longer he lets new
    ones on until those have left who share it then, and tries again, for twice as long
    each time, to two seconds. So those who share it may wait for each other, in this
    lock or in others: nobody who shares it is held up for good.

    A thread that shares it already may share it again at any time.
    Thread safety: any; but only one thread at a time may want it alone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._shares: set[Share] = set()
        self._epoch = 0
        self._held_back = False  # new ones, for somebody who wants it alone
        self._alone = False
        self._own = threading.local()

    @property
    def depth(self) -> int:
        """How often the calling thread shares it now."""
        self._let_go()
        return self._thread().depth

    def enter(self, frame: FrameType | None = None) -> Share:
        """Shares it until ``leave``, in whichever thread that is called.

        Args:
            frame: of a call that the share is for. It ends with that, too.
        """
        thread = self._thread()
        share = Share(thread, frame)
        with self._changed:
            while (self._held_back or self._alone) and not thread.depth:
                self._changed.wait()
            share._epoch = self._epoch
            share._held = True
            self._shares.add(share)
            thread.depth += 1
        return share

    def leave(self, share: Share) -> None:
        """Ends a share; nothing if it has ended."""
        with self._changed:
            if not share._held:
                return
            share._held = False
            share.frame = None
            self._shares.discard(share)
            share._thread.depth -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, timeout_s: float = math.inf) -> Iterator[None]:
        """While it is entered nobody shares it. Not for a thread that does.

        Raises:
            OperationTimeoutError: others have shared it for all that time.
        """
        self._take(time.monotonic() + timeout_s, timeout_s)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()

    def _take(self, until: float, timeout_s: float) -> None:
        hold_s = _HOLD_S
        while not self._hold_back(min(time.monotonic() + hold_s, until)):
            self._let_on(until)
            if time.monotonic() >= until:
                raise OperationTimeoutError(
                    f"forwards of the model, or reading(), were under way for all of "
                    f"{timeout_s} s. Nothing was changed. Call it again, or leave "
                    "reading() sooner."
                )
            hold_s = min(2 * hold_s, _LONGEST_HOLD_S)

    def _hold_back(self, until: float) -> bool:
        """Takes it alone once nobody shares it; whether that came in time."""
        with self._changed:
            self._held_back = True
            try:
                self._alone = self._wait(lambda: not self._shares, until)
            finally:
                self._held_back = False
                if not self._alone:
                    self._changed.notify_all()
            return self._alone

    def _let_on(self, until: float) -> None:
        """Waits until those have left who share it now, while others come."""
        with self._changed:
            self._epoch += 1
            now = self._epoch
            self._wait(lambda: all(one._epoch >= now for one in self._shares), until)

    def _wait(self, wanted: Callable[[], bool], until: float) -> bool:
        """Waits within the lock, and lets shares go whose call is over."""
        while not wanted():
            left = until - time.monotonic()
            if left <= 0:
                return False
            if not self._changed.wait(min(left, _LOOK_S)):
                self._changed.release()
                try:
                    self._let_go()
                finally:
                    self._changed.acquire()
        return True

    def _let_go(self) -> None:
        """Ends shares whose call is over. Not within the lock: objects may end."""
        with self._changed:
            shares = list(self._shares)
        for share in shares:
            if share.ended:
                self.leave(share)

    def _thread(self) -> _Thread:
        found: _Thread | None = getattr(self._own, "thread", None)
        if found is None:
            found = self._own.thread = _Thread()
        return found
