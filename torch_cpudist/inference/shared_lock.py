# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A lock that many hold together, or one alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class SharedLock:
    """Whoever wants it alone waits for those who share it, and new ones for him.

    A thread that shares it already may share it again, also while somebody waits.
    Thread safety: any.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._sharing = 0
        self._wanted = 0  # by those who want it alone
        self._alone = False
        self._own = threading.local()

    @property
    def depth(self) -> int:
        """How often the calling thread shares it now."""
        return getattr(self._own, "depth", 0)

    def enter(self) -> None:
        """Shares it; ``leave`` ends that, once for each call."""
        if self.depth == 0:
            with self._changed:
                while self._alone or self._wanted:
                    self._changed.wait()
                self._sharing += 1
        self._own.depth = self.depth + 1

    def leave(self) -> None:
        """Ends one ``enter`` of the calling thread; nothing if there was none."""
        if self.depth == 0:
            return
        self._own.depth -= 1
        if self._own.depth == 0:
            with self._changed:
                self._sharing -= 1
                if not self._sharing:
                    self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While it is entered nobody shares it. Not for a thread that does."""
        with self._changed:
            self._wanted += 1
            try:
                while self._alone or self._sharing:
                    self._changed.wait()
                self._alone = True
            finally:
                self._wanted -= 1
                if not self._alone:
                    self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
