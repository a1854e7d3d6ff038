# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of parameters on servers, which write them while training goes on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch_cpudist import _core, ranges
from torch_cpudist.drivers.saving import CutAnswer, Presence, Saving, Written
from torch_cpudist.errors import Error, SnapshotError
from torch_cpudist.log import logger
from torch_cpudist.served import loading, residues
from torch_cpudist.served.described import dense_of, tables_of
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.snapshot.manifest import File, Version

if TYPE_CHECKING:
    from pathlib import Path

    from torch_cpudist.launch.run import Run
    from torch_cpudist.snapshot.choice import Plan, Target
    from torch_cpudist.snapshot.reading import Snapshot
    from torch_cpudist.snapshot.staging import Stage

# Of the states that a server tells of a cut; in the others it will not be there.
_WRITING, _DONE = 1, 2
_AGAIN, _TORN = 1, 2


def cut_answer(
    number: int, taken: int, name: str, reason: str, back: int, leader: int = 0
) -> CutAnswer:
    """What came of a mark, as the core tells it: ``back`` if it was taken back."""
    again, torn = back == _AGAIN, back == _TORN
    return CutAnswer(number, bool(taken), name, reason, leader, again=again, torn=torn)


class ServedSaving(Saving):
    """Of a parameter set. A mark is a request to every server, between two pushes."""

    on_servers = True
    goes_on_alone = True
    deltas = True

    def __init__(self, parameters: ParameterSet, run: Run, together: bool) -> None:
        """Saves ``parameters``.

        Args:
            parameters: open on the servers.
            run: this trainer's.
            together: see ``Saving``.
        """
        self.together = together
        self.takes_back = self.waits_at_once = not together
        self._parameters = parameters
        self._run = run
        self._servers = run.server_count
        groups = parameters.placement.layout.trainer_groups or [0] * run.trainer_count
        self.asks_first = not together and groups.count(groups[0]) > 1
        # A trainer that comes later than the start, in a job of its own, is in none.
        own = groups[run.trainer_rank : run.trainer_rank + 1]
        self._of_first_group = own == groups[:1]
        # By cut, what each server has said at its end.
        self._done: dict[int, dict[int, Any]] = {}

    @property
    def _opened(self) -> _core.ParamSet:
        return self._parameters.opened

    @property
    def in_step(self) -> bool:
        """Also where this trainer and trainer 0 wait for each other's pushes."""
        return self.together or (self.asks_first and self._of_first_group)

    def count(self, steps: int, rounds: int) -> int:
        """Rounds where trainers are together, as one may have left some; else steps."""
        return rounds if self.together else steps

    def knows(self, number: int) -> bool:
        """Asks every server."""
        return all(
            self._opened.cut_status(server, number)["can_be_base"]
            for server in range(self._servers)
        )

    def mark(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> CutAnswer | None:
        """Sends the mark and waits for the others'."""
        opened = self._opened
        with ranges.of(ranges.WAIT), self._held(number, hold_ms):
            taken, told, reason, back = opened.mark_cut(number, name, wait_ms, base)
        leader = 0
        if taken and self.together and self._run.trainer_rank > 0:
            try:
                leader = min(self.members(number))  # trainer 0 may have left
            except SnapshotError as error:  # whoever leads it has given it up already
                taken, reason = False, str(error)
        return cut_answer(number, taken, told or name, reason, back, leader)

    @contextlib.contextmanager
    def _held(self, number: int, hold_ms: int) -> Iterator[None]:
        """Takes the mark back where others do not come for so long."""
        if hold_ms == 0:
            yield
            return
        over = threading.Event()
        opened = self._opened

        def take_back() -> None:
            # Once more, as a server may not have the mark yet.
            while not over.wait(hold_ms / 1000):
                with contextlib.suppress(Error):  # whoever waits meets it, too
                    opened.take_marker_back(number)

        thread = threading.Thread(target=take_back, name="mark of a cut", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def members(self, number: int) -> tuple[int, ...]:
        """As the first server knows them: all have said the same."""
        found = tuple(self._opened.cut_status(0, number)["members"])
        if not found:
            raise SnapshotError(
                f"servers know of no cut {number} any more: who commits it has given "
                "it up, and that trainer's log says why"
            )
        return found

    def taking_part(self) -> tuple[int, ...]:
        """Who would mark a cut of now, as the first server knows. Any thread."""
        return tuple(self._opened.cut_status(0, 0)["members"])

    def presence(self) -> Presence:
        """Asks every server."""
        found = [self._opened.cut_status(one, 0) for one in range(self._servers)]
        return Presence(
            frozenset(rank for one in found for rank in one["present"]),
            frozenset(rank for one in found for rank in one["lost"]),
        )

    def ask(self, number: int, name: str, wait_ms: int) -> str:
        """Tells every server, which tell it in their replies to pushes."""
        return self._opened.announce_cut(number, name, wait_ms)

    def wanted(self) -> int:
        """As the newest reply to a push has said."""
        return self._opened.cut_wanted()

    def poll(self, number: int) -> Written | None:
        """Asks the servers that have not ended."""
        done = self._done.setdefault(number, {})
        for server in range(self._servers):
            if server in done:
                continue
            status = self._opened.cut_status(server, number)
            if status["state"] == _WRITING:
                return None
            if status["state"] != _DONE:
                reason = status["reason"] or "it knows of no such cut any more"
                raise SnapshotError(f"server {server}: {reason}")
            done[server] = status
        del self._done[number]
        return self._written(done)

    def _written(self, done: dict[int, Any]) -> Written:
        first, placement = done[0], self._parameters.placement
        files = [
            File(
                name=file["name"],
                bytes=file["bytes"],
                table=file["table"],
                rows=file["rows"],
                crc32c=tuple(file["crcs"]),
            )
            for server in range(self._servers)
            for file in done[server]["files"]
        ]
        bases = {one["base"] for one in done.values()}
        if len(bases) > 1:
            raise SnapshotError(f"servers have written changes since cuts {bases}")
        table_steps = [
            max(steps)
            for steps in zip(
                *(one["table_steps"] for one in done.values()), strict=True
            )
        ]
        block_steps = [
            max(steps)
            for steps in zip(
                *(one["block_steps"] for one in done.values()), strict=True
            )
        ]
        return Written(
            version=Version(first["round"], first["samples"], first["steps"]),
            servers=self._servers,
            members=tuple(first["members"]),
            tables=tables_of(placement, table_steps),
            dense=dense_of(placement, block_steps),
            files=tuple(files),
            base=bases.pop(),
        )

    def abandon(self, number: int) -> None:
        """Tells every server."""
        self._done.pop(number, None)
        if not self._parameters.closed:
            self._opened.abandon_cut(number)

    def own_state(self) -> dict[str, Any]:
        """What lossy pushes of this trainer hold back. Cost: a copy of it."""
        if not self._opened.holds_back():
            return {}
        return {"residues": residues.saved(self._parameters)}

    def restore_own_state(
        self, tree: Mapping[str, Any], own: bool, plan: Plan
    ) -> list[str]:
        """Has it held back again, by the trainer whose it is."""
        if plan.whole and self._opened.holds_back():
            saved = tree.get("residues") if own else None
            residues.restore(self._parameters, saved or {}, plan)
        return []

    def use(self, path: Path) -> None:
        """Tells the server of this process."""
        coding = self._parameters.placement.layout.push_dtype
        if coding != "fp32" and not self._opened.holds_back():
            logger.info(
                "snapshots do not have what pushes in %s have rounded off and not yet "
                "sent",
                coding,
            )
        if self._run.server is not None:
            self._run.server.set_snapshot_directory(str(path))

    def sees(self, token: str) -> list[str]:
        """Asks every server."""
        blind = []
        for server in range(self._servers):
            status = self._opened.cut_status(server, 0, token)
            if status["state"] != _DONE:
                blind.append(f"server {server} ({status['reason']})")
        return blind

    def targets(self) -> list[Target]:
        """As servers have them."""
        return loading.targets(self._parameters.placement)

    def load(self, snapshot: Snapshot, plan: Plan, stage: Stage) -> None:
        """Has every server read its rows, and sends dense blocks."""
        loading.load(self._parameters, snapshot, self._servers, plan, stage)

    def take_in(self, plan: Plan) -> None:
        """All rows here are old; dense values come now."""
        loading.take_in(self._parameters, plan)
