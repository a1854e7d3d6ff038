# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether a schedule of the learning rate goes on with every step, or now and then.

A script calls ``scheduler.step()`` after ``opt.step()``, where a snapshot is taken. One
that goes on with every step belongs to the snapshot as it is after that; one that goes
on with every epoch as it is before, since who resumes at the end of an epoch's data
calls it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def schedules_of(objects: Mapping[str, Any]) -> dict[str, LRScheduler]:
    """Those of the objects that are schedules of torch."""
    return {n: one for n, one in objects.items() if isinstance(one, LRScheduler)}


def _mark(schedule: LRScheduler) -> tuple[Any, ...]:
    """Something that differs once it went on."""
    names = ("last_epoch", "_step_count", "_last_lr")
    found = (getattr(schedule, name, None) for name in names)
    return tuple(tuple(one) if isinstance(one, list) else one for one in found)


class Schedules:
    """Watches schedules between steps of the optimizer. Not thread-safe."""

    def __init__(self, watched: Mapping[str, LRScheduler]) -> None:
        """Watches these, by name."""
        self._watched = dict(watched)
        self._after: dict[str, tuple[Any, ...]] = {}
        # Names of those that went on in the gap before the present one; None: there was
        # none yet.
        self._before: set[str] | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._watched)

    def left(self) -> None:
        """A step is over: the gap after it begins."""
        self._after = {name: _mark(one) for name, one in self._watched.items()}

    def every_step(self) -> list[str]:
        """Those that go on with every step, in the gap that is open now too.

        One gap alone says as much where there was none before.
        """
        gone_on = self._gone_on()
        return [n for n in gone_on if self._before is None or n in self._before]

    def entered(self) -> None:
        """The next step begins: the gap is over."""
        if self._after:
            self._before = self._gone_on()

    def _gone_on(self) -> set[str]:
        return {
            name
            for name, one in self._watched.items()
            if name in self._after and _mark(one) != self._after[name]
        }
