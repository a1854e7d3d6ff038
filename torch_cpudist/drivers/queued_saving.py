# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots where marks go through a queue: that of Async, and what came of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_cpudist import _core
from torch_cpudist.drivers.saving import CutAnswer
from torch_cpudist.drivers.served_saving import ServedSaving, cut_answer
from torch_cpudist.served.set import ParameterSet

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run
    from torch_cpudist.snapshot.choice import Plan


def queued_answer(found: tuple[int, bool, str, str, int] | None) -> CutAnswer | None:
    """What came of a mark that was queued."""
    if found is None:
        return None
    number, taken, name, reason, back = found
    return cut_answer(number, taken, name, reason, back)


class QueuedSaving(ServedSaving):
    """Of Async: a mark goes through the queue, behind the pushes of all steps."""

    comes_and_goes = True

    def __init__(
        self, parameters: ParameterSet, run: Run, pushes: _core.AsyncPushes
    ) -> None:
        """Saves ``parameters``, whose queue is ``pushes``."""
        super().__init__(parameters, run, together=False)
        self.asks_first = False  # nobody waits for another's step
        self.waits_at_once = parameters.bounded  # in the push of the next step
        self._pushes = pushes

    def mark(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> CutAnswer | None:
        """Puts the mark into the queue; the answer comes later."""
        self._pushes.mark_cut(number, name, wait_ms, base, hold_ms)
        return None

    def take_in(self, plan: Plan) -> None:
        """As above; a bound on staleness counts from now."""
        if self._parameters.bounded:
            self._opened.leave()  # and joins again
        super().take_in(plan)

    def answer(self) -> CutAnswer | None:
        """The queue's."""
        return queued_answer(self._pushes.cut_answer())
