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
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def schedules_of(objects: Mapping[str, Any]) -> dict[str, LRScheduler]:
    """Those of the objects that are schedules of torch."""
    return {n: one for n, one in objects.items() if isinstance(one, LRScheduler)}


@dataclass(frozen=True)
class _Mark:
    """Where a schedule stands.

    Attributes:
        rates: its list of rates, of which every step makes a new one, as its last act.
        values: something that differs once it went on, whoever wrote it.
        position: how far it is; ``None`` where it does not count.
    """

    rates: object
    values: tuple[Any, ...]
    position: int | None


def _mark(schedule: LRScheduler) -> _Mark:
    names = ("last_epoch", "_step_count", "_last_lr")
    found = (getattr(schedule, name, None) for name in names)
    values = tuple(tuple(one) if isinstance(one, list) else one for one in found)
    rates = getattr(schedule, "_last_lr", None)
    return _Mark(rates, values, _position(schedule))


def _position(schedule: object) -> int | None:
    """Of a chain, that of its first part, which goes on whenever it does."""
    found = getattr(schedule, "last_epoch", None)
    if isinstance(found, int):
        return found
    parts = getattr(schedule, "_schedulers", None)
    return _position(parts[0]) if parts else None


def _tells_its_end(schedule: LRScheduler) -> bool:
    """Whether another thread can see that a step of it is over.

    Those of torch replace their rates as the last thing that they do; one that has a
    ``step`` of its own may do more after that.
    """
    return type(schedule).step.__module__ == LRScheduler.__module__


class Schedules:
    """Watches schedules between steps of the optimizer. Not thread-safe."""

    def __init__(self, watched: Mapping[str, LRScheduler]) -> None:
        """Watches these, by name."""
        self._watched = dict(watched)
        self._after: dict[str, _Mark] = {}
        # How far those went, by name, that went on in the gap before the present one;
        # None: there was none yet.
        self._before: dict[str, int] | None = None

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

    def seen(self) -> bool:
        """Whether those that go on with every step are known to have done so.

        All that went on in the gap before have, as far as then, in the one that is open
        now. May be asked while another thread steps them; their states are whole then,
        until the next gap. False where it cannot be known.
        """
        if self._before is None or not self._after:
            return False
        gone_on = self._gone_on()
        return all(
            _tells_its_end(self._watched[name])
            and self._watched[name].__dict__.get("_last_lr")
            is not self._after[name].rates
            and far <= 1  # within the second of two steps nothing says so
            and gone_on.get(name, -1) >= far
            for name, far in self._before.items()
        )

    def entered(self) -> None:
        """The next step begins: the gap is over."""
        if self._after:
            self._before = self._gone_on()

    def _gone_on(self) -> dict[str, int]:
        """How far each has gone that has since the gap began."""
        found = {}
        for name, one in self._watched.items():
            before, now = self._after.get(name), _mark(one)
            if before is None:
                continue
            if now.rates is not before.rates or now.values != before.values:
                found[name] = (now.position or 0) - (before.position or 0)
        return found
