# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots where exchanges are rounds of all trainers: Geo with an outer optimizer.

Servers have the values and the outer optimizer's state; they cut between two rounds. A
trainer marks when it has taken a round in and has begun no other: all trainers do so
between the same two, whatever step each of them is at. What a trainer has moved since
is its own, and in its file.

Trainer 0 asks between two rounds, so that the replies to the next one, which everybody
gets, say that its end is to be marked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim import Optimizer

from torch_cpudist.drivers.geo_saving import GeoSaving, Moving
from torch_cpudist.drivers.saving import CutAnswer
from torch_cpudist.model.dense_memory import Weights
from torch_cpudist.served import local_movement
from torch_cpudist.served.local import LocalParameterSet

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run
    from torch_cpudist.snapshot.choice import Plan


class MovingInRounds(Moving, Protocol):
    """Also says where it is between two exchanges."""

    @property
    def exchanging(self) -> bool:
        """Whether one is under way."""

    def since_exchange(self) -> dict[str, int]:
        """Counters since the last one began, and how long it is to the next."""

    def go_on_since(self, counted: Mapping[str, int]) -> None:
        """Takes these over, with the movement that they are of."""


@dataclass
class _Asked:
    """A cut that trainer 0 wants."""

    number: int
    name: str
    wait_ms: int
    announced: bool = False


class GeoRoundsSaving(GeoSaving):
    """The servers' values between two rounds, and what each trainer has moved since."""

    comes_and_goes = False
    goes_on_alone = False
    at_barrier = True
    keeps_nobody = True

    def __init__(
        self,
        driver: MovingInRounds,
        parameters: LocalParameterSet,
        run: Run,
        inners: Sequence[Optimizer],
    ) -> None:
        """Saves ``parameters``, which ``driver`` trains by ``inners``."""
        super().__init__(driver, parameters, run, inners)
        self.asks_first, self.takes_back = True, False
        self._rounds = driver
        self._marked = self._held_for = 0  # numbers of cuts
        self._asked: _Asked | None = None
        self._refused: deque[CutAnswer] = deque()
        self._given_up: deque[int] = deque()  # numbers of cuts that servers still know
        self._answered = True  # the last mark
        self._do_between: Callable[[], None] | None = None

    @property
    def in_step(self) -> bool:
        """All save together what the script asks for: at a barrier."""
        return True

    # -- between two exchanges, from the driver ----------------------------------------

    def holds_off(self) -> bool:
        """Whether the exchange that is due waits for the end of this step.

        That is a moment to be marked, then. Asks for marks, if that is wanted.
        """
        self._abandon_given_up()
        self._announce()
        wanted = self._wanted()
        if wanted in (0, self._held_for):
            return False
        self._held_for = wanted  # for this step alone, whatever becomes of the mark
        return True

    def pass_between(self, more: bool) -> None:
        """An exchange is over, without a step's end before the next one.

        Args:
            more: another one begins.
        """
        self._abandon_given_up()
        if more:
            self._announce()
        if self._wanted() and self._do_between is not None:
            self._do_between()

    def when_between(self, do: Callable[[], None]) -> None:
        """Has ``do`` mark what is wanted then."""
        self._do_between = do

    def _announce(self) -> None:
        asked = self._asked
        if asked is None:
            return
        if asked.announced:
            # A round has ended since: it is asked for now, or was given up.
            if self._opened.cut_wanted() != asked.number:
                self._asked = None
            return
        asked.announced = True
        reason = self._opened.announce_cut(asked.number, asked.name, asked.wait_ms)
        if reason:
            self._asked = None
            self._refused.append(
                CutAnswer(asked.number, False, asked.name, reason, unmarked=True)
            )

    def _wanted(self) -> int:
        number = self._opened.cut_wanted()
        return number if number > self._marked else 0

    # -- marks -------------------------------------------------------------------------

    def ask(self, number: int, name: str, wait_ms: int) -> str:
        """Has all trainers mark the end of the exchange that begins next."""
        if self._asked is not None:
            return "the moment of the one before is still awaited"
        self._asked = _Asked(number, name, wait_ms)
        return ""

    def wanted(self) -> int:
        """As the replies to the last exchange have said, when that is over."""
        return 0 if self._rounds.exchanging else self._wanted()

    def mark(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> CutAnswer | None:
        """Queues the mark, behind the last exchange; the answer comes later."""
        self._abandon_given_up()
        self._marked, self._answered = number, False
        if self._asked is not None and self._asked.number <= number:
            self._asked = None
        with Weights(self._local.placement.dense) as weights:
            self._local.exchange.mark_cut(weights, number, name, wait_ms)
        return None

    def answer(self) -> CutAnswer | None:
        """The queue's; before it, what servers have not even asked for."""
        if self._refused:
            return self._refused.popleft()
        found = super().answer()
        if found is not None and found.number == self._marked:
            self._answered = True
        return found

    def abandon(self, number: int) -> None:
        """Has servers told between two exchanges: one under way waits for trainers.

        Any thread, and it waits for nobody.
        """
        self._done.pop(number, None)
        self._given_up.append(number)

    def _abandon_given_up(self) -> None:
        """Tells servers, while nothing of this trainer is on its way there."""
        while self._answered and self._given_up:
            super().abandon(self._given_up.popleft())

    # -- what trainers keep ------------------------------------------------------------

    def use(self, path: Path) -> None:
        """Tells the server of this process."""
        if self._run.server is not None:
            self._run.server.set_snapshot_directory(str(path))

    def own_state(self) -> dict[str, Any]:
        """Also what was moved and not handed on. Cost: a copy of that."""
        return {
            **super().own_state(),
            "since": self._rounds.since_exchange(),
            "moved": local_movement.saved(self._local),
        }

    def _restore_movement(self, tree: Mapping[str, Any], plan: Plan) -> list[str]:
        if "moved" not in tree:
            return []
        lost = local_movement.put_back(self._local, tree["moved"], plan)
        self._rounds.go_on_since(tree["since"])
        return [
            f"what this trainer had moved of {name!r} since its last exchange does not "
            "fit it, and is not taken"
            for name in lost
        ]
