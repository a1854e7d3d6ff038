# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a trainer has lost with servers, or as one that they have lost."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

# Of so many cuts it is known when they were marked.
_MOST_MOMENTS = 256
# Open on the left: steps (3, 5] are the fourth and the fifth.
Interval = tuple[float, float]


def _cut(intervals: list[Interval], begin: float) -> list[Interval]:
    """Those parts of them that are before ``begin``."""
    return [(a, min(b, begin)) for a, b in intervals if a < begin]


def _length(intervals: list[Interval]) -> float:
    return sum(b - a for a, b in intervals)


class Recovered:
    """Of one optimizer. Not thread-safe.

    What was lost once is lost: a second loss that goes back behind the first one counts
    what both have in common once.
    """

    def __init__(self) -> None:
        """Nothing was lost yet."""
        self.count = 0
        self.rejoined = 0
        self.torn = 0
        self._steps: list[Interval] = []
        self._times: list[Interval] = []

    def add(
        self, kept: tuple[int, float], lost: tuple[int, float]
    ) -> tuple[int, float]:
        """Servers have come back with values of an earlier moment.

        Args:
            kept: this trainer's step, and the time, of that moment.
            lost: of the loss.

        Returns:
            Updates and seconds between them.
        """
        self.count += 1
        kept = min(kept[0], lost[0]), min(kept[1], lost[1])
        before = _length(self._steps)
        self._steps = [*_cut(self._steps, kept[0]), (kept[0], lost[0])]
        self._times = [*_cut(self._times, kept[1]), (kept[1], lost[1])]
        return round(_length(self._steps) - before), lost[1] - kept[1]

    def rejoin(self, last: int, lost: int, torn: int) -> None:
        """Servers had counted this trainer as lost, and have taken it again.

        Args:
            last: its last step whose gradients were handed on.
            lost: so many, to that one, that not all servers have applied.
            torn: so many of them that some have.
        """
        self.rejoined += 1
        self.torn += torn
        if lost:
            self._steps = [*_cut(self._steps, last - lost), (last - lost, last)]

    def drop(self, step: int) -> None:
        """The gradients of this step are not used: they are of values before."""
        self._steps.append((step - 1, step))

    def stats(self) -> dict[str, Any]:
        """``recovered`` of ``DistributedOptimizer.stats``."""
        return {
            "count": self.count,
            "rejoined": self.rejoined,
            "lost_updates": round(_length(self._steps)),
            "torn_updates": self.torn,
            "lost_s": _length(self._times),
        }


class Moments:
    """When this trainer has marked cuts. Not thread-safe."""

    def __init__(self) -> None:
        """None was marked."""
        self._times: OrderedDict[int, float] = OrderedDict()

    def note(self, number: int, time_s: float) -> None:
        """A cut was marked, by the monotonic clock."""
        self._times[number] = time_s
        while len(self._times) > _MOST_MOMENTS:
            self._times.popitem(last=False)

    def get(self, number: int, unknown: float) -> float:
        """When it was marked here, else ``unknown``."""
        return self._times.get(number, unknown)
