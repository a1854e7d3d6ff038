# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ends what ``init()`` waits for in the core, once its time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from torch_cpudist.errors import Error, OperationTimeoutError

# The core's own clocks end with the same time, and know better who is missing.
_GRACE_S = 0.5


class StartGuard:
    """While it is entered, a wait that is too long is ended and is an error.

    Cost: one thread for as long. Thread safety: one thread enters it and leaves it.
    """

    def __init__(self, remaining_s: float, missing: str) -> None:
        """Begins nothing yet.

        Args:
            remaining_s: longest time from now on.
            missing: what has not happened then, for the message.
        """
        self._until = time.monotonic() + remaining_s + _GRACE_S
        self._missing = missing
        self._ends: list[Callable[[str], None]] = []
        self._done = threading.Condition()
        self._entered = False
        self._error: Error | None = None
        self._thread = threading.Thread(
            target=self._watch, name="the clock of init()", daemon=True
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
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Looks no more.

        Raises:
            OperationTimeoutError: the wait was ended.
        """
        with self._done:
            self._entered = False
            self._done.notify()
        self._thread.join()
        if self._error is not None and (error is None or isinstance(error, Error)):
            raise self._error from error

    def _watch(self) -> None:
        with self._done:
            while self._entered:
                left_s = self._until - time.monotonic()
                if left_s <= 0:
                    break
                self._done.wait(min(left_s, threading.TIMEOUT_MAX))
            if not self._entered:
                return
            self._error = OperationTimeoutError(
                f"init() waited as long as it may; {self._missing}. Look at the output "
                "of the others, or pass a longer init(timeout_s=...)."
            )
            ends = tuple(self._ends)
        for end in ends:
            end(str(self._error))
