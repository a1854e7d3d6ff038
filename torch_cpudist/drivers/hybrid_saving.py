# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of tables on servers, and of dense parameters that every trainer has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_cpudist.drivers.copied_saving import CopiedSaving
from torch_cpudist.drivers.fetched_saving import FetchedSaving
from torch_cpudist.drivers.saving import CutAnswer, Saving, Written
from torch_cpudist.errors import Error

if TYPE_CHECKING:
    from pathlib import Path

    from torch_cpudist.snapshot.choice import Plan, Target
    from torch_cpudist.snapshot.files import Files
    from torch_cpudist.snapshot.reading import Snapshot
    from torch_cpudist.snapshot.staging import Stage


class HybridSaving(Saving):
    """Of two parts, at one step of all trainers.

    Trainers agree by a collective of the dense part, whose values trainer 0 copies
    then; where these are on servers they are at one step anyway, and the first that is
    there reads them, and commits.
    Each marks the tables after the same step: a mark that goes through a queue stands
    behind the pushes of all steps up to it and before those of later ones.
    """

    together = True
    on_servers = False  # not alone

    def __init__(self, sparse: Saving, dense: CopiedSaving | FetchedSaving) -> None:
        """Composes those of two parts."""
        self._sparse = sparse
        self._dense = dense
        self.deltas = sparse.deltas  # of the tables
        self.goes_on_alone = dense.goes_on_alone and sparse.goes_on_alone
        # Number of the last mark of the tables, until it is answered; 0: it is.
        self._awaited = 0

    def count(self, steps: int, rounds: int) -> int:
        """As the dense part does."""
        return self._dense.count(steps, rounds)

    def ready(self) -> bool:
        """As the dense part is."""
        return self._dense.ready()

    def make_ready(self) -> None:
        """Makes the dense part so. Collective."""
        self._dense.make_ready()

    def knows(self, number: int) -> bool:
        """Asks the servers."""
        return self._sparse.knows(number)

    def mark(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> CutAnswer | None:
        """Agrees, then marks the tables. Collective."""
        agreed = self._dense.agree(number, name, self._awaited > 0)
        if not agreed.taken:
            return agreed
        self._awaited = number  # before: another thread may take the answer at once
        answer = None
        try:
            answer = self._sparse.mark(number, name, wait_ms, base)
        except BaseException:
            self._awaited = 0
            self._dense.abandon(number)
            raise
        if answer is not None:
            self._awaited = 0
            answer = self._led(answer)
        return answer

    def answer(self) -> CutAnswer | None:
        """That of the tables. Asks a server who leads, where trainers may have left."""
        found = self._sparse.answer()
        if found is not None:
            if found.number == self._awaited:  # not that of an earlier one
                self._awaited = 0
            found = self._led(found)
        return found

    def holds_step(self) -> bool:
        """Whether the next step waits for the answer to a mark of the tables.

        A client has one request under way to a server that changes it: who pushes dense
        gradients to servers in a round sends no mark before that is over, and who waits
        for others' marks pushes none. And trainers that come back, which they do once
        all others have pushed dense gradients of a step, are in no cut of an earlier
        one.
        """
        return self._awaited > 0 and isinstance(self._dense, FetchedSaving)

    def _led(self, answer: CutAnswer) -> CutAnswer:
        """Finds out who has read dense values: the first that took part."""
        if not answer.taken or not self.goes_on_alone:
            return answer
        try:
            members = self._sparse.members(answer.number)
        except Error as error:
            # Trainer 0 has given it up already; or a server does not answer, which who
            # steps meets, too. Either way this answer is all that there is.
            return replace(answer, taken=False, reason=str(error))
        return replace(answer, leader=0 if members is None else min(members))

    def members(self, number: int) -> tuple[int, ...] | None:
        """Those of the tables, where trainers may have left."""
        return self._sparse.members(number) if self.goes_on_alone else None

    def begin(self, number: int, folder: Path, files: Files) -> None:
        """Says where this trainer writes what it has of the dense part."""
        self._dense.begin(number, folder, files)

    def poll(self, number: int) -> Written | None:
        """Writes dense values once the servers have written rows.

        The first server's file of dense values, which has none, is replaced by one that
        has them.
        """
        tables = self._sparse.poll(number)
        if tables is None:
            return None
        dense = self._dense.poll(number)
        if dense is None:
            return None
        written = {file.name for file in dense.files}
        files = [file for file in tables.files if file.name not in written]
        return replace(tables, dense=dense.dense, files=(*files, *dense.files))

    def abandon(self, number: int) -> None:
        """Drops both."""
        self._dense.abandon(number)
        self._sparse.abandon(number)

    # -- what trainers keep ------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """That of both parts."""
        return {"sparse": self._sparse.own_state(), "dense": self._dense.own_state()}

    def states_of_all(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Tells the dense part."""
        self._dense.states_of_all(lambda: [one.get("dense", {}) for one in read()])

    def restore_own_state(
        self, tree: Mapping[str, Any], own: bool, plan: Plan
    ) -> list[str]:
        """Puts that of both parts back."""
        missing = self._sparse.restore_own_state(tree.get("sparse", {}), own, plan)
        return missing + self._dense.restore_own_state(tree.get("dense", {}), own, plan)

    # -- loading -----------------------------------------------------------------------

    def use(self, path: Path) -> None:
        """Tells the server of this process."""
        self._sparse.use(path)

    def sees(self, token: str) -> list[str]:
        """Asks the servers."""
        return self._sparse.sees(token)

    def targets(self) -> list[Target]:
        """Those of both parts."""
        return [*self._sparse.targets(), *self._dense.targets()]

    def load(self, snapshot: Snapshot, plan: Plan, stage: Stage) -> None:
        """Loads both parts."""
        self._sparse.load(snapshot, plan, stage)
        self._dense.load(snapshot, plan, stage)

    def take_in(self, plan: Plan) -> None:
        """Takes both over."""
        self._sparse.take_in(plan)
        self._dense.take_in(plan)
