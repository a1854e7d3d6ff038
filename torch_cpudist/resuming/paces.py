# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""When it is time for a snapshot: every so many steps or seconds."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch_cpudist.errors import AddressError, InvalidArgumentError

if TYPE_CHECKING:
    from torch_cpudist.drivers.saving import Saving
    from torch_cpudist.launch.run import Run

_FULL_EVERY = 10
# Trainers that are together come to the moment of a snapshot at once, or never.
_TOGETHER_WAIT_MS = 60_000
# How long a trainer's own steps may wait for others' marks: then its own is taken back.
_HOLD_MS = 100


class Board(Protocol):
    """Where trainer 0 leaves what the others look for."""

    def show(self, key: str, value: object) -> None:
        """Leaves it, once."""

    def shown(self, key: str) -> object:
        """What was left, else ``None``."""


@dataclass(frozen=True)
class Often:
    """How often, and how many: what ``resume`` was given.

    Attributes:
        every_steps, every_s: steps and seconds between snapshots of all rows.
        delta_every_steps, delta_every_s: the same of those of changes.
        full_every: of how many snapshots a chain of those of changes consists at most.
        keep: how many stay.
    """

    every_steps: int | None = None
    every_s: float | None = None
    delta_every_steps: int | None = None
    delta_every_s: float | None = None
    full_every: int = _FULL_EVERY
    keep: int = 3

    @property
    def deltas(self) -> bool:
        """Whether there are to be any of changes."""
        return self.delta_every_steps is not None or self.delta_every_s is not None

    def check(self) -> None:
        """Checks every one.

        Raises:
            InvalidArgumentError: no whole number of steps, or no seconds, or too few;
                or a length of chains where there are none.
        """
        for name in ("every_steps", "delta_every_steps", "full_every", "keep"):
            value, least = getattr(self, name), 2 if name == "full_every" else 1
            whole = isinstance(value, int) and not isinstance(value, bool)
            optional = name.endswith("_steps") and value is None
            if not optional and not (whole and value >= least):
                raise InvalidArgumentError(
                    f"resume: {name}={value!r}, expected a whole number from {least} up"
                )
        for name in ("every_s", "delta_every_s"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < 1e9):
                raise InvalidArgumentError(
                    f"resume: {name}={value!r}, expected seconds above 0"
                )
        if self.full_every != _FULL_EVERY and not self.deltas:
            raise InvalidArgumentError(
                f"resume: full_every={self.full_every} is of how many snapshots a "
                "chain of changes consists, and neither delta_every_steps nor "
                "delta_every_s is given: all have all rows. Pass one of them, or leave "
                "full_every out."
            )


class Pace:
    """Says when. From the thread that steps.

    Where all trainers have to come to it at one step, seconds are trainer 0's: it names
    a step to come before it takes part in it, so that whoever is behind that step can
    read which it was. The others look only when half of the time is over. Cost, from
    then on: one look into the store per step.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_s: float | None,
        board: Board | None,
        key: str,
        leads: bool,
        late: bool,
    ) -> None:
        """Begins to count time.

        Args:
            every_steps: steps between snapshots.
            every_s: seconds between snapshots.
            board: where trainer 0 names steps; ``None``: this trainer decides alone.
            key: of what it leaves there.
            leads: this is trainer 0.
            late: a step after the one that was named does as well.
        """
        self._every_steps = every_steps
        self._every_s = every_s
        self._board = board
        self._key = key
        self._leads = leads
        self._late = late
        self._told: int | None = None
        self._named = 0
        self._since = time.monotonic()

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._since

    def before_step(self, count: int) -> None:
        """On trainer 0: names the step that comes, if it is time.

        Args:
            count: of steps that are over.
        """
        if self._every_s is None or self._board is None or not self._leads:
            return
        if self._told is None and self._elapsed >= self._every_s:
            with contextlib.suppress(AddressError):
                self._board.show(f"{self._key}/{self._named}", count + 1)
                self._told = count + 1

    def due(self, count: int, ready: bool) -> bool:
        """Whether it is time now, after step ``count``.

        Args:
            count: of steps that are over.
            ready: a snapshot can be of this moment.
        """
        by_steps = self._every_steps is not None and count % self._every_steps == 0
        by_seconds = ready and self._every_s is not None and self._seconds(count)
        return by_steps or by_seconds

    def _seconds(self, count: int) -> bool:
        every_s = self._every_s or 0.0
        if self._board is None:
            if self._elapsed < every_s:
                return False
            self._since = time.monotonic()
            return True
        if self._told is None and not self._leads and self._elapsed >= every_s / 2:
            with contextlib.suppress(AddressError):
                named = self._board.shown(f"{self._key}/{self._named}")
                self._told = None if named is None else int(str(named))
        if self._told is None or count < self._told:
            return False
        hit = self._late or count == self._told  # else others were there without this
        self._told = None
        self._named += 1
        self._since = time.monotonic()
        return hit


def paces_of(often: Often, run: Run, saving: Saving, key: str) -> tuple[Pace, Pace]:
    """Those of snapshots of all rows, and of changes.

    Args:
        often: what ``resume`` was given.
        run: this trainer's.
        saving: of the driver.
        key: of what trainer 0 leaves for the others.

    Raises:
        InvalidArgumentError: seconds, where trainers cannot agree on a step.
    """
    board: Board | None = run.rendezvous
    agree = saving.together and run.trainer_count > 1
    if run.environment.apart is not None:
        board = None
    for which, every_s in (("", often.every_s), ("delta_", often.delta_every_s)):
        if agree and board is None and every_s is not None:
            raise InvalidArgumentError(
                f"resume: {which}every_s={every_s} where trainers step together and "
                "are in jobs of their own, which have no place to agree on a step. "
                f"Pass {which}every_steps."
            )
    whole, delta = (
        Pace(
            every_steps,
            every_s,
            board if agree else None,
            key=f"{key}/{which}pace",
            leads=run.trainer_rank == 0,
            late=not (saving.on_servers or saving.goes_on_alone),
        )
        for which, every_steps, every_s in (
            ("", often.every_steps, often.every_s),
            ("delta_", often.delta_every_steps, often.delta_every_s),
        )
    )
    return whole, delta


class StepTimes:
    """How long others may take to the end of their next step, judged by one's own.

    An evaluation between two steps counts as part of a step: others make one, too.
    """

    _REMEMBERED = 32
    _TIMES = 5  # as long as the longest of those
    _USUAL = 2  # as long as most of them

    def __init__(self, least_ms: int, most_ms: int) -> None:
        """Of no step yet.

        Args:
            least_ms: that others may always take.
            most_ms: that nobody waits longer than.
        """
        self._least_ms, self._most_ms = least_ms, most_ms
        self._took_s: deque[float] = deque(maxlen=self._REMEMBERED)
        self._began_s: float | None = None

    def begin(self, now_s: float, counts: bool = True) -> None:
        """A step begins, and with it ends what the last one took.

        Args:
            now_s: of a monotonic clock.
            counts: the last one did not wait for others' marks: it would take as long
                as they may, and they would be given five times that the next time.
        """
        if self._began_s is not None and counts:
            self._took_s.append(now_s - self._began_s)
        self._began_s = now_s

    def hold_ms(self, least_ms: int) -> int:
        """How long this trainer waits for others' next steps, and for no evaluation.

        Args:
            least_ms: that it waits in any case.
        """
        usual_s = sorted(self._took_s)[len(self._took_s) // 2] if self._took_s else 0.0
        return max(least_ms, int(1000 * self._USUAL * usual_s))

    def wait_ms(self) -> int:
        """What others get."""
        longest_ms = 1000 * max(self._took_s, default=0.0)
        return max(self._least_ms, min(int(self._TIMES * longest_ms), self._most_ms))


class Waits:
    """How long marks wait for those of other trainers.

    Attributes:
        steps: what this trainer's steps have taken.
    """

    def __init__(self, saving: Saving, least_ms: int, deadline_ms: int) -> None:
        """Of one trainer.

        Args:
            saving: of the driver.
            least_ms: that others have to the end of their next step.
            deadline_ms: that a round has.
        """
        self._saving = saving
        self._deadline_ms = deadline_ms
        self.steps = StepTimes(least_ms, deadline_ms // 2)

    def hold_ms(self, at_once: bool) -> int:
        """How long others may keep this trainer from its steps; 0: as they may take.

        Args:
            at_once: the script waits for the snapshot.
        """
        if at_once or not self._saving.takes_back:
            return 0
        if self._saving.waits_at_once:
            return self.steps.hold_ms(_HOLD_MS)
        return _HOLD_MS

    def wait_ms(self, at_once: bool) -> int:
        """How long others may take; to a call of the script as long as to a step.

        Args:
            at_once: the script waits for the snapshot.
        """
        if self._saving.together:
            return self._deadline_ms * 9 // 10 if at_once else _TOGETHER_WAIT_MS
        saving = self._saving
        if not at_once and (saving.takes_back or saving.keeps_nobody):
            return self._deadline_ms // 2  # nobody trains later for it
        if saving.keeps_nobody:
            return self._deadline_ms * 9 // 10
        return self.steps.wait_ms()
