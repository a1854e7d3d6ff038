# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranges that torch's profiler shows of this package, by name.

While no profiler is active nothing is made: each pull and push looks at a variable.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch.autograd import profiler

from torch_cpudist import _core

# Rows or dense values come from servers: a lookup, a prefetch, a flush.
PULL = "cpudist::pull"
# Gradients of a step go to servers; under Sync until the updated values are here.
PUSH = "cpudist::push"
# Trainers tell each other what they have moved or found, by servers or by themselves.
EXCHANGE = "cpudist::exchange"
# Inside the others: this thread is blocked on servers or other trainers.
WAIT = "cpudist::wait"

_NOTHING = nullcontext()


class Range:
    """A range, and in it one for each wait of its thread. Not reusable."""

    def __init__(self, name: str) -> None:
        self._range = torch.profiler.record_function(name)
        self._waiting: torch.profiler.record_function | None = None
        self._listener = self._told  # one object, which the core borrows

    def __enter__(self) -> None:
        self._range.__enter__()  # type: ignore[no-untyped-call]
        self._before = _core.listen_to_waits(self._listener)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _core.listen_to_waits(self._before)
        del self._listener
        self._range.__exit__(kind, error, trace)

    def _told(self, begins: bool) -> None:
        if begins:
            self._waiting = torch.profiler.record_function(WAIT)
            self._waiting.__enter__()  # type: ignore[no-untyped-call]
        elif self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None


def of(name: str) -> AbstractContextManager[None]:
    """A range of the calling thread while it is entered; nothing without a profiler.

    Args:
        name: one of those above; ``WAIT`` for what waits as a whole.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    if name == WAIT:
        return torch.profiler.record_function(name)
    return Range(name)
