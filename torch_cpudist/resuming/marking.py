# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Of which moments there are snapshots: when one is due, who asks, and the marks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch_cpudist.drivers.saving import Saving
from torch_cpudist.errors import Error, SnapshotError
from torch_cpudist.log import logger
from torch_cpudist.resuming.captured import Captured
from torch_cpudist.resuming.meeting import Meeting
from torch_cpudist.resuming.own_state import OwnState
from torch_cpudist.resuming.paces import Often, Waits, paces_of
from torch_cpudist.resuming.recovered import Moments
from torch_cpudist.resuming.saves import Save, Saves, Tip
from torch_cpudist.resuming.subject import Subject
from torch_cpudist.resuming.trainer_tree import tree_of
from torch_cpudist.resuming.wanted import Wanted
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory

# How long others may take to the end of their next step, at least.
WAIT_MS = 10_000
_POLL_S = 0.02


class Marks:
    """Those that one trainer makes. From the thread that steps.

    Attributes:
        last: number of the newest cut that was marked; later ones have larger ones.
        round: that the last step was of.
        pause_s_max: the longest that a mark has kept this trainer from its steps.
    """

    def __init__(
        self,
        subject: Subject,
        directory: Directory,
        often: Often,
        own: OwnState,
        moments: Moments,
    ) -> None:
        """Nothing is due; ``begin`` comes next.

        Args:
            subject: whose snapshots they are.
            directory: where they are.
            often: when one is due.
            own: what takes a trainer's own state.
            moments: where it is noted when each was marked.

        Raises:
            InvalidArgumentError: see ``paces_of``.
        """
        self._subject = subject
        self._run = run = subject.run
        self._leads = run.trainer_rank == 0
        self._directory = directory
        self._often = often
        self._own = own
        self._moments = moments
        saving = subject.driver.saving
        self._pace, self._delta_pace = paces_of(
            often, run, saving, f"snapshots/{subject.number}"
        )
        self._waits = Waits(saving, WAIT_MS, run.environment.round_deadline_ms)
        self.last = 0
        self.round = 0
        self.pause_s_max = 0.0

    def begin(
        self,
        saving: Saving,
        captured: Captured,
        saves: Saves,
        meeting: Meeting,
        wanted: Wanted | None,
    ) -> None:
        """Takes what is of one run: servers that come back are another one.

        Args:
            saving: of the driver.
            captured: what is marked and not handed on.
            saves: what is being written.
            meeting: of the trainers.
            wanted: snapshots that servers want; ``None``: this trainer does not look.
        """
        self._saving = saving
        self._captured = captured
        self._saves = saves
        self._meeting = meeting
        self._wanted = wanted
        self._due = False
        self._full_due = False  # and with all rows
        self._asked = 0  # number of the newest cut that was asked for
        self._asked_full = 0  # and of the newest with all rows
        self._marked = False  # in the step that ends, or a mark is not answered yet
        saving.when_between(self._mark_between)

    def went_back(self, number: int) -> None:
        """The run has gone back to a cut: what was due was of steps that are undone."""
        self._due = self._full_due = False
        self.last = max(self.last, number)

    # -- between steps -----------------------------------------------------------------

    def before_step(self, counted: Mapping[str, int]) -> None:
        """The next step begins."""
        self._waits.steps.begin(time.monotonic(), counts=not self._marked)
        self._marked = bool(self._captured)
        self._captured.step_begins()
        for pace in (self._pace, self._delta_pace):
            pace.before_step(self._count(counted))

    def after_step(self, counted: Mapping[str, int]) -> None:
        """A step is over: takes part in a snapshot if it is time."""
        self.round = counted["rounds"]
        self._captured.step_over()
        self._captured.take_answers(wait=False)
        saving = self._saving
        count, ready = self._count(counted), saving.ready()
        if saving.together or self._leads:
            self._full_due = self._pace.due(count, ready) or self._full_due
            self._due = self._delta_pace.due(count, ready) or self._due
        if self._wanted is not None:
            waits = self._captured or self._captured.again or self._saves.writing
            idle = not waits
            self._due = self._wanted.due(idle, self._saves.counts.saved) or self._due
        if (self._due or self._full_due) and ready:
            full, self._due, self._full_due = self._full_due, False, False
            why = "" if saving.together else self._no_time()
            if not why:
                self._begin_one(full, counted)
                if not saving.asks_first:
                    return
            else:
                self._saves.skip(why)
        if not saving.together:
            self._mark_wanted(counted)

    def _no_time(self) -> str:
        """Why no snapshot is begun now; empty if one is."""
        now, again = time.monotonic(), self._captured.again
        if self._captured:
            return "the moment of the one before is still awaited"
        if self._saves.writing:
            return "the one before is still being written"
        if again is not None and now < again.until:
            return "the one before waits for trainers that do not step"
        if self._captured.rests(now):
            return "others did not come to the last one in time"
        self.give_up_again("trainers have not stepped in time")
        return ""

    def _begin_one(self, full: bool, counted: Mapping[str, int]) -> None:
        number = self.next_number(counted)
        if self._saving.asks_first:
            self._asked_full = number if full else 0
            self._ask(number)
        else:
            base = None if full else self._base()
            self.mark(number, self.name(number), counted, False, base)

    def _mark_between(self) -> None:
        """Marks what servers ask for where no step ends before it is too late."""
        self._mark_wanted(self._subject.counters.counters())
        self._captured.settle()

    def _mark_wanted(self, counted: Mapping[str, int]) -> None:
        """Marks what servers ask for, if they do; also what was taken back."""
        wanted, again = self._saving.wanted(), self._captured.again
        if again is not None and wanted == again.number:
            if again.base is not None and self._saves.tip is not again.base:
                self.give_up_again(f"snapshot {again.base.base.name} has gone")
            else:
                self.mark(wanted, again.name, counted, False, again.base, again.until)
        elif wanted > self.last:
            base = None if wanted == self._asked_full else self._base()
            self.mark(wanted, "", counted, False, base)

    def give_up_again(self, why: str) -> None:
        """Gives up what was taken back, and waits to be marked again; on trainer 0."""
        again = self._captured.again
        if again is None or not self._leads:
            return
        self._captured.forget_again()
        self._saves.skip(f"{why}, and snapshot {again.number} still waited for others")
        with contextlib.suppress(Error):
            self._saving.abandon(again.number)
        self._directory.end(again.name or self.name(again.number))

    def _base(self) -> Tip | None:
        """What a snapshot of changes would be put over now; ``None``: take all rows."""
        tip = self._saves.tip if self._leads and self._often.deltas else None
        if tip is None or tip.members >= self._often.full_every:
            return None
        if self._saving.knows(tip.number):
            return tip
        logger.info(
            "servers do not know what has changed since snapshot %s: all rows are "
            "saved",
            tip.base.name,
        )
        return None

    def _ask(self, number: int) -> None:
        """Has all trainers mark their next moment, this one too."""
        wait_ms = self._waits.wait_ms(at_once=False)
        self._directory.begin(self.name(number))
        reason = self._saving.ask(number, self.name(number), wait_ms)
        if reason:
            self._directory.end(self.name(number))
            self._saves.skip(reason)
            return
        if self.last < self._asked < number:  # given up before anybody has marked it
            self._directory.end(self.name(self._asked))
        self._asked = number

    # -- one moment --------------------------------------------------------------------

    def _count(self, counted: Mapping[str, int]) -> int:
        return self._saving.count(counted["steps"], counted["rounds"])

    def next_number(self, counted: Mapping[str, int]) -> int:
        """What a cut of now is called by, where no other one has that number."""
        return max(self._count(counted), self.last + 1)

    def name(self, number: int) -> str:
        """Of the snapshot of a cut that nobody gives another one."""
        return names.snapshot_name(number, self._run.run_id, self._subject.number)

    def mark(
        self,
        number: int,
        name: str,
        counted: Mapping[str, int],
        whole: bool,
        base: Tip | None = None,
        until: float = 0.0,
    ) -> None:
        """Marks a moment, this one.

        Args:
            number: of its cut.
            name: of its snapshot; empty where servers tell it.
            counted: what the optimizer has counted.
            whole: no step is under way: schedules are as they are to be saved.
            base: what it is put over; ``None``: it has all rows.
            until: so long it may be marked again if it is taken back; 0: as usual.
        """
        began = time.monotonic()
        hold_ms = self._waits.hold_ms(whole)
        wait_ms = self._waits.wait_ms(whole)
        if (hold_ms > 0 or self._saving.keeps_nobody) and until == 0:
            until = began + wait_ms / 1000
        tree = self.tree(counted)
        self.last = max(self.last, number)
        steps = counted["steps"]
        save = Save(number, steps, tree, began, None, whole, False, base, False, name)
        save.until = until
        self._moments.note(number, began)
        if name:  # now, so that nobody makes it once it was given up
            self._directory.begin(name)
        self._captured.add(save)
        if base is not None and self._saves.tip is not base:
            save.base = base = None  # it may have gone before it was known to be needed
        self._marked = True
        try:
            since = 0 if base is None else base.number
            answer = self._saving.mark(number, name, wait_ms, since, hold_ms)
        except BaseException:
            self._captured.drop(number)
            if name:
                self._directory.end(name)
            raise
        if answer is not None:
            self._captured.answered(answer)
        if self._captured:
            self._saves.watch()
        self.pause_s_max = max(self.pause_s_max, time.monotonic() - began)

    def tree(self, counted: Mapping[str, int]) -> dict[str, Any]:
        """This trainer's own state."""
        return tree_of(counted, self._own.capture(), self._saving.own_state())

    def number_of_group(self, counted: Mapping[str, int], limit_s: float) -> int:
        """What trainer 0 gives a snapshot that its group takes at once.

        One that it has asked for, and that would be taken a step later, gives way.
        """

        def chosen() -> dict[str, Any]:
            if self._asked > self.last:
                self._saving.abandon(self._asked)
                self._directory.end(self.name(self._asked))
                self.last = self._asked
            return {"number": self.next_number(counted)}

        if self._saving.at_barrier:
            return int(self._meeting.decided(chosen, loads=False)["number"])
        check = self._run.trainer_client().check
        found = self._meeting.handed("number", self.round, chosen, limit_s, check)
        return int(found["number"])

    def await_answers(self, numbers: Sequence[int], limit_s: float) -> None:
        """Waits for the answers to marks.

        Raises:
            SnapshotError: there are none for so long.
        """
        self._subject.driver.settle()
        until = time.monotonic() + limit_s
        self._captured.take_answers()
        while late := {save.number for save in self._captured.all()} & set(numbers):
            if time.monotonic() > until:
                raise SnapshotError(
                    f"no server has answered the mark of cut {min(late)}"
                )
            time.sleep(_POLL_S)
            self._captured.take_answers()
