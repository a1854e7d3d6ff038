# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How much of an exchange a step does, and whether exchanges are over in time."""

from __future__ import annotations

import time

from torch_cpudist.log import logger
from torch_cpudist.strategies.geo import LONGEST_INTERVAL, Geo

# How much the last step counts in the measured time of a step.
_NEWEST_SHARE = 0.1


class ExchangePace:
    """The time of a step and the lateness of exchanges of one optimizer.

    An exchange is late when it is under way, with nothing left to do but wait or no
    time for it, while the next is due. Not thread-safe: the training thread's.
    """

    def __init__(self, strategy: Geo) -> None:
        """Begins with no step measured and nothing late."""
        self._share = strategy.exchange_budget
        self._in_rounds = strategy.outer is not None
        # The first ones of a default interval are due at almost every step.
        self._least_told = 1 if strategy.push_every else LONGEST_INTERVAL
        self._step_s = 0.0
        self._ended = 0.0
        self._late = 0
        self._late_steps = 0
        self._late_by: int | None = None  # steps, of the one under way; None: in time
        self._warned = False

    @property
    def budget_s(self) -> float | None:
        """Seconds of a step for the exchange; ``None``: as it takes to be in time."""
        return None if self._share is None else self._share * self._step_s

    def begin_step(self) -> None:
        """To be called when a step has trained and the exchange is next."""
        if self._ended:
            last_s = time.perf_counter() - self._ended
            newest = _NEWEST_SHARE if self._step_s else 1.0
            self._step_s += newest * (last_s - self._step_s)

    def end_step(self) -> None:
        """To be called at the end of a step."""
        self._ended = time.perf_counter()

    def note_due(self) -> None:
        """To be called at every step at which one is under way and the next is due."""
        if self._late_by is not None:
            self._late_by += 1
            self._late_steps += 1

    def note_late(self, interval: int) -> None:
        """To be called when that step has not ended it without waiting.

        ``interval``: steps from its beginning to the next one's.
        """
        if self._late_by is None:
            self._late_by = 0
            self._late += 1
        elif self._late_by == interval:
            self._warn(interval, self._late_by)  # it may never end

    def note_end(self, interval: int) -> None:
        """To be called when it has ended, then or at another call."""
        if self._late_by:
            self._warn(interval, self._late_by)
        self._late_by = None

    def _warn(self, interval: int, late_by: int) -> None:
        # In rounds others may be who has not moved yet, which no setting changes.
        if self._warned or self._share is None or self._in_rounds:
            return
        if interval < self._least_told:
            return
        self._warned = True
        logger.warning(
            "Geo(push_every=%d, exchange_budget=%g): an exchange was under way %d "
            "steps after the next was due, so that trainers see each other's movement "
            "less often than push_every says. Leave exchange_budget at None, which "
            "ends each exchange in time, or set push_every to at least %d. Further "
            "late exchanges are counted in stats()['exchange']['late'].",
            interval,
            self._share,
            late_by,
            interval + late_by,
        )

    def stats(self) -> dict[str, int]:
        """``late``: exchanges that were; ``late_steps``: by so many steps in all."""
        return {"late": self._late, "late_steps": self._late_steps}
