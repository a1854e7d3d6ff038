# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ends what ``init()`` waits for in the core: its time is over, or a rank has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from torch_cpudist.errors import Error, OperationTimeoutError

# The core's own clocks end with the same time, and know better who is missing.
_GRACE_S = 0.5
# How often to look who has ended.
_LOOK_S = 0.05
# For a look that is under way; one at a store that does not answer is left to itself.
_LAST_LOOK_S = 1.0


class StartGuard:
    """While it is entered, a wait that is too long or in vain is ended and is an error.

    Cost: two threads for as long, one of which looks 20 times a second who has ended.
    Thread safety: one thread enters it and leaves it.
    """

    def __init__(
        self,
        remaining_s: float,
        missing: str,
        lost: Callable[[], Error | None] | None = None,
    ) -> None:
        """Begins nothing yet.

        Args:
            remaining_s: longest time from now on.
            missing: what has not happened then, for the message.
            lost: says who has ended meanwhile; asked in a thread of its own, as it may
                have to wait.
        """
        self._until = time.monotonic() + remaining_s + _GRACE_S
        self._missing = missing
        self._lost = lost
        self._ends: list[Callable[[str], None]] = []
        self._done = threading.Condition()
        self._entered = False
        self._error: Error | None = None
        self._thread = threading.Thread(
            target=self._watch, name="the clock of init()", daemon=True
        )
        self._lookout = threading.Thread(
            target=self._look, name="the lookout of init()", daemon=True
        )

    def ends(self, end: Callable[[str], None]) -> None:
        """Adds what ends a wait; it takes the reason."""
        with self._done:
            self._ends.append(end)
            error = self._error
        if error is not None:
            end(str(error))

    def __enter__(self) -> StartGuard:
        """Begins to look at the clock."""
        self._entered = True
        self._thread.start()
        if self._lost is not None:
            self._lookout.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Looks no more.

        Raises:
            OperationTimeoutError: the wait was ended, as it was too long.
            Error: the same, as ``lost`` said that it was in vain.
        """
        with self._done:
            self._entered = False
            self._done.notify_all()
        self._thread.join()
        if self._lost is not None:
            self._lookout.join(_LAST_LOOK_S)
        if self._error is not None and (error is None or isinstance(error, Error)):
            raise self._error from error

    def _watch(self) -> None:
        with self._done:
            while self._entered and self._error is None:
                left_s = self._until - time.monotonic()
                if left_s <= 0:
                    break
                self._done.wait(min(left_s, threading.TIMEOUT_MAX))
        self._end(
            OperationTimeoutError(
                f"init() waited as long as it may; {self._missing}. Look at the output "
                "of the others, or pass a longer init(timeout_s=...)."
            )
        )

    def _look(self) -> None:
        if self._lost is None:
            return
        while True:
            error = self._lost()
            if error is not None:
                return self._end(error)
            with self._done:
                if self._entered and self._error is None:
                    self._done.wait(_LOOK_S)
                if not self._entered or self._error is not None:
                    return None

    def _end(self, error: Error) -> None:
        """Ends every wait, unless there is none any more or it was done before."""
        with self._done:
            if not self._entered or self._error is not None:
                return
            self._error = error
            self._done.notify_all()
            ends = tuple(self._ends)
        for end in ends:
            end(str(error))
