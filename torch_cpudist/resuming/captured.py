# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Moments that a trainer has marked, until each is handed on to be written.

Two threads look after them. The one that steps marks, and it alone tells when a step
begins and ends. The one that writes takes answers that have come since, and schedules
that have gone on: an evaluation after a mark keeps no snapshot waiting. One lock holds
the moments, what belongs to them and what is known of schedules; nobody waits for a
server or a file while it has it. Another one keeps answers in their order, and a server
may be asked about one meanwhile: who steps leaves them to who has it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from torch_cpudist.drivers.saving import CutAnswer, Saving
from torch_cpudist.errors import Error
from torch_cpudist.resuming.own_state import OwnState
from torch_cpudist.resuming.saves import Save, Saves
from torch_cpudist.resuming.schedules import Schedules
from torch_cpudist.snapshot.directory import Directory

# After others did not come: of the time that follows, waiting for them takes this part.
_WAITING_SHARE = 0.05
# What was refused sooner was refused for another reason.
_WAITED_S = 1.0


class Captured:
    """Of one optimizer. Thread safety: any thread, but where a method says else.

    Attributes:
        leader: the trainer that commits the newest one that was answered.
    """

    def __init__(
        self,
        saving: Saving,
        saves: Callable[[], Saves],
        own: OwnState,
        schedules: Schedules,
        directory: Directory,
        rank: int,
    ) -> None:
        """Nothing is marked.

        Args:
            saving: of the driver.
            saves: where they are handed on to.
            own: what takes a trainer's own state.
            schedules: of the script, that are saved with it.
            directory: where snapshots are.
            rank: this trainer's.
        """
        self._saving = saving
        self._saves = saves
        self._own = own
        self._schedules = schedules
        self._directory = directory
        self._rank = rank
        self._lock = threading.Lock()
        self._taking = threading.Lock()  # outside of the other one
        self._by_number: dict[int, Save] = {}
        self._again: Save | None = None
        self._rests_until = 0.0
        self.leader = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._by_number)

    def all(self) -> list[Save]:
        """Those that are not handed on."""
        with self._lock:
            return list(self._by_number.values())

    @property
    def awaits_answer(self) -> bool:
        """Whether one of them is not answered yet."""
        return any(save.answer is None for save in self.all())

    @property
    def again(self) -> Save | None:
        """What this trainer has marked and taken back, as others did not come.

        It is marked again, as of a later moment, when servers ask for it.
        """
        return self._again

    def forget_again(self) -> None:
        """It is not to be marked again."""
        with self._lock:
            self._again = None

    def rests(self, now_s: float) -> bool:
        """Whether others have just been waited for in vain, so that no mark is made.

        Pushes stand behind a mark that is not answered.

        Args:
            now_s: of a monotonic clock.
        """
        return now_s < self._rests_until

    def add(self, save: Save) -> None:
        """One is about to be marked. From the thread that steps."""
        with self._lock:
            save.whole = save.whole or not self._schedules
            self._by_number[save.number] = save
            self._again = None

    def drop(self, number: int) -> None:
        """It could not be marked."""
        with self._lock:
            self._by_number.pop(number, None)

    def clear(self) -> None:
        """The run goes back: what was marked is of no use."""
        with self._lock:
            self._by_number.clear()
            self._again = None

    # -- steps, from the thread that makes them ----------------------------------------

    def step_over(self) -> None:
        """A step is over."""
        with self._lock:
            self._schedules.left()

    def step_begins(self) -> None:
        """The next step begins: schedules are as they are saved."""
        self.settle()
        with self._lock:
            self._schedules.entered()

    def settle(self) -> None:
        """Takes schedules as they are now: the next step comes, or none for a while."""
        with self._lock:
            gone = self._take_schedules()
        self._abandon(gone)

    # -- any thread --------------------------------------------------------------------

    def look(self) -> bool:
        """Takes what has come, for the thread that writes.

        Returns:
            Whether there is more to come.
        """
        try:
            self.take_answers()
            with self._lock:
                seen = self._by_number and self._schedules.seen()
                gone = self._take_schedules() if seen else []
            self._abandon(gone)
        except Exception:  # the thread that steps meets it, too, and raises it
            return False
        return bool(self)

    def take_answers(self, wait: bool = True) -> None:
        """Goes on with those whose mark was answered meanwhile.

        Args:
            wait: until another thread that is about it has gone on with them; it may
                ask a server about one. Else they are left to it.

        Raises:
            PeerLostError, OperationTimeoutError: pushes of this trainer have failed.
        """
        if not self._taking.acquire(blocking=wait):
            return
        try:  # the next one is not taken before this one is handed on
            while (answer := self._saving.answer()) is not None:
                self.answered(answer)
        finally:
            self._taking.release()

    def answered(self, answer: CutAnswer) -> None:
        """Goes on with one whose mark was answered at once."""
        with self._lock:
            gone = self._answered(answer)
        self._abandon(gone)

    def _answered(self, answer: CutAnswer) -> list[Save]:
        """Returns what is to be given up, with the lock released."""
        save = self._by_number.get(answer.number)
        if answer.unmarked:
            self._saves().skip(answer.reason)
            began = time.monotonic()
            return [Save(answer.number, 0, {}, began, name=answer.name)]
        if save is None:
            return []
        if answer.again:
            del self._by_number[answer.number]
            self._again = save
            return []
        if not answer.taken:
            self._saves().skip(answer.reason)
            del self._by_number[answer.number]
            now = time.monotonic()
            waited_s = now - save.began
            if waited_s >= _WAITED_S and save.until == 0:
                self._rests_until = now + waited_s / _WAITING_SHARE
            if self._rank == 0:  # it has made the directory also where it only asked
                save.name = save.name or answer.name
            may_be_taken = self._rank == 0 or self._saving.together  # by some servers
            return [save] if may_be_taken or answer.torn else []
        save.answer = answer
        self.leader = answer.leader
        save.leads = answer.leader == self._rank
        if save.leads:
            folder = self._directory.folder(answer.name)
            self._saving.begin(answer.number, folder, self._directory.files)
        return self._hand_on(save)

    def _hand_on(self, save: Save) -> list[Save]:
        if not save.whole or save.answer is None:
            return []
        taken = self._saves().put(save)  # first: what it is put over stays
        self._by_number.pop(save.number, None)
        return [] if taken else [save]

    def _take_schedules(self) -> list[Save]:
        """Takes over what schedules have done since the steps that were captured."""
        waiting = [save for save in self._by_number.values() if not save.whole]
        if not waiting:
            return []
        gone_on = self._schedules.every_step()
        gone: list[Save] = []
        for save in waiting:
            own = save.tree["own"]
            for name in gone_on:
                own["objects"][name] = self._own.object_state(name)
            if gone_on:
                own["groups"] = self._own.options()
            save.whole = True
            gone += self._hand_on(save)
        return gone

    def _abandon(self, saves: list[Save]) -> None:
        for save in saves:
            with contextlib.suppress(Error):
                self._saving.abandon(save.number)
            if save.name and not save.given_up:
                self._directory.end(save.name)
