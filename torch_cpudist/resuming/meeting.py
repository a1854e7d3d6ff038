# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How trainers agree on a directory of snapshots, and on what was loaded from it.

What trainer 0 has to say stands in small files of the directory itself: that all see it
is what has to be found out anyway.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_cpudist.drivers.saving import Saving
from torch_cpudist.errors import (
    ConfigMismatchError,
    Error,
    SnapshotCorruptError,
    SnapshotError,
    describe,
)
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import reported

if TYPE_CHECKING:
    from torch_cpudist.launch.rendezvous import Rendezvous
    from torch_cpudist.launch.run import Run

_SAVED, _FAILED = "saved", "failed"
_POLL_S = 0.02
# Words in the directory that stay: whoever waits for one is not so many behind.
_WORDS = 16
_WRITABLE = "See that the directory exists on this host, can be written and has space."


def _half_done(why: str, loads: bool) -> SnapshotError:
    """An error after which values may be of two moments, if it ``loads`` any."""
    if loads:
        why += ". Values may have changed: load a snapshot as a whole before you go on."
    error = SnapshotError(why)
    error.partly_loaded = loads
    return error


def _outcome(found: dict[str, Any]) -> dict[str, Any]:
    """What trainer 0 has told, or raised."""
    if "error" in found:
        corrupt = found["kind"] == SnapshotCorruptError.__name__
        kind = SnapshotCorruptError if corrupt else SnapshotError
        told = kind(f"trainer 0: {found['error']}")
        told.partly_loaded = found["partly_loaded"]
        raise told
    return found


class Meeting:
    """Of the trainers of one optimizer. Every method is collective, or says whose."""

    def __init__(self, run: Run, directory: Directory, number: int) -> None:
        """No message yet.

        Args:
            run: this trainer's.
            directory: as this trainer understands it.
            number: which of the run's optimizers it is.
        """
        self._run = run
        self._directory = directory
        self._number = number
        self._key = f"snapshots/{number}"
        self._mark = f"{names.TOKEN}{names.run_text(run.run_id)}-{number}"
        self._last_told = self._mark
        self._loaded = f"{self._mark}-loaded"
        self._decisions = 0  # equal on all
        self._handed: Counter[str] = Counter()  # at this round; equal on all of a group
        self._handed_at = -1
        self._words: deque[str] = deque()

    def meet(self, saving: Saving) -> None:
        """Sees that all trainers and servers mean one directory.

        Raises:
            ConfigMismatchError: names who does not see it.
        """
        run = self._run
        saving.use(self._directory.path)
        run.barrier()  # servers of trainers know it only now
        problem = ""
        if run.trainer_rank == 0:
            try:
                self._directory.sweep(run.run_id, self._number)
                self._directory.write_word(self._mark, b"")
                problem = "; ".join(saving.sees(self._mark))
            except SnapshotError as error:
                problem = str(error)
        run.barrier()
        if not problem and not self._directory.sees(self._mark):
            problem = f"trainer {run.trainer_rank} ({self._directory.path})"
        problem = self.first_problem(problem)
        if run.trainer_rank == 0:
            self._take_away(self._mark)
        if problem:
            raise ConfigMismatchError(
                "snapshots need one directory that all processes see and can write "
                f"to; this trainer's is {self._directory.path}. Not so: {problem}. "
                "Name the same one by resume(path) or, also for servers of their own, "
                "by CPUDIST_SNAPSHOT_DIR."
            )

    def find(self, folder: Path) -> None:
        """Sees that all trainers find a snapshot that lies elsewhere.

        Raises:
            SnapshotError: names the first that does not.
        """
        directory = Directory(folder.parent, self._directory.files)
        rank, problem = self._run.trainer_rank, ""
        try:
            directory.manifest(folder.name)
        except SnapshotError as error:
            problem = f"trainer {rank}: {error}"
            if inside := Directory(folder, self._directory.files).names():
                problem += f" {folder} has snapshots in it: {inside}. Name one of them."
        problem = self.first_problem(problem)
        if problem:
            raise SnapshotError(f"{problem} Nothing was changed.")

    def first_problem(self, problem: str) -> str:
        """The problem of the first trainer that has one; empty if none has."""
        run, board = self._run, self._board()
        if board is not None:
            board.show(f"{self._key}/{run.trainer_rank}", problem)
        run.barrier()
        if board is None:
            return problem
        found = [board.shown(f"{self._key}/{r}") for r in range(run.trainer_count)]
        return next((str(one) for one in found if one), problem)

    def _board(self) -> Rendezvous | None:
        """Where ranks of one job leave each other words."""
        apart = self._run.environment.apart is not None
        return None if apart else self._run.rendezvous

    def tell(self, number: int, why: str | None) -> None:
        """Lets the others know, from who commits it, what came of a snapshot.

        Not collective.

        Args:
            number: of its cut.
            why: it will not come; ``None``: it is there.
        """
        outcome = _SAVED if why is None else _FAILED
        if (board := self._board()) is not None:
            board.show(f"{self._key}/{outcome}/{number}", why or _SAVED)
            return
        self._take_away(self._last_told)  # all have come on to this one
        self._last_told = f"{self._mark}-{outcome}-{number}"
        with contextlib.suppress(SnapshotError):  # the others' wait ends all the same
            self._directory.write_word(self._last_told, b"")

    def saved(self, number: int) -> bool:
        """Whether a snapshot is there, if its leader has told; not collective."""
        return self._told(_SAVED, number) is not None

    def failed(self, number: int) -> str | None:
        """Why a snapshot will not come, if its leader has told; not collective."""
        return self._told(_FAILED, number)

    def _told(self, outcome: str, number: int) -> str | None:
        if (board := self._board()) is not None:
            shown: str | None = board.shown(f"{self._key}/{outcome}/{number}")
            return shown
        there = self._directory.sees(f"{self._mark}-{outcome}-{number}")
        return "it failed; that trainer's log says why" if there else None

    def decided(
        self, do: Callable[[], dict[str, Any]], loads: bool = True
    ) -> dict[str, Any]:
        """What trainer 0 has done, for all; or why it could not.

        Whatever fails there, all come to both barriers and all raise.

        Args:
            do: called on trainer 0, while the others wait.
            loads: it changes values: what fails in a way that is not known, or behind
                it, may have left them changed.

        Raises:
            SnapshotCorruptError, SnapshotError: as ``do``; on all.
        """
        run, failed = self._run, None
        self._decisions += 1
        found: dict[str, Any] = {}
        if run.trainer_rank == 0:
            found, failed = self._tried(do, loads)
            try:
                self._pass_on(json.dumps(found))
            except Error as error:
                failed = failed or _half_done(
                    f"trainer 0 could not tell the others what came of it: {error}",
                    loads,
                )
        run.barrier()
        if run.trainer_rank > 0:
            try:
                found = self._passed_on()
            except Error as error:
                failed = _half_done(f"trainer 0 has not told: {error}", loads)
        run.barrier()
        if run.trainer_rank == 0:
            self._take_away(self._loaded)
        if failed is not None:
            raise failed
        return _outcome(found)

    def handed(
        self,
        what: str,
        at: int,
        do: Callable[[], dict[str, Any]],
        limit_s: float,
        check: Callable[[], None],
    ) -> dict[str, Any]:
        """As ``decided`` without loading, of trainer 0's group: the others train on.

        Args:
            what: is done. Who waits for something else, or at another round, as after a
                call that has failed on one of them, does not take it for his own.
            at: the round that all of the group have come to.
            do: called on trainer 0, while its group waits.
            limit_s: for so long.
            check: called now and then by those that wait.

        Raises:
            SnapshotCorruptError, SnapshotError: as ``do``; on all of the group.
        """
        if at != self._handed_at:
            self._handed_at = at
            self._handed.clear()
        self._handed[what] += 1
        # Decisions first: who has gone back comes to the same rounds again.
        word = f"{self._decisions}-{at}-{what}-{self._handed[what]}"
        if self._run.trainer_rank == 0:
            found, failed = self._tried(do, loads=False)
            self._hand(word, json.dumps(found))
            if failed is not None:
                raise failed
            return found
        until = time.monotonic() + limit_s
        while (text := self._heard(word)) is None:
            check()
            if time.monotonic() > until:
                raise SnapshotError(
                    f"trainer 0 has not come to this call within {limit_s:g} s, or "
                    f"could not leave its word in {self._directory.path}, which its "
                    "log says. All trainers of its group call it, after the same step."
                )
            time.sleep(_POLL_S)
        return _outcome(json.loads(text))

    def _hand(self, word: str, text: str) -> None:
        if (board := self._board()) is not None:
            board.show(f"{self._key}/handed/{word}", text)
            return
        self._words.append(f"{self._mark}-handed-{word}")
        if len(self._words) > _WORDS:
            self._take_away(self._words.popleft())
        self._directory.write_word(self._words[-1], text.encode())

    def _heard(self, word: str) -> str | None:
        if (board := self._board()) is not None:
            shown: str | None = board.shown(f"{self._key}/handed/{word}")
            return shown
        name = f"{self._mark}-handed-{word}"
        if not self._directory.sees(name):
            return None
        path = self._directory.path / name
        with reported(f"cannot read {path}", _WRITABLE):
            return self._directory.files.read(path).decode()

    def _tried(
        self, do: Callable[[], dict[str, Any]], loads: bool
    ) -> tuple[dict[str, Any], Exception | None]:
        """What it returned or, for the others, how it failed; and that."""
        failed: Exception
        try:
            return do(), None
        except Error as error:
            failed = error
        except Exception as error:  # the others wait whatever it is
            failed = _half_done(describe(error), loads) if loads else error
            failed.__cause__ = error if failed is not error else error.__cause__
        found = {
            "kind": type(failed).__name__,
            "error": str(failed) if isinstance(failed, Error) else describe(failed),
            "partly_loaded": isinstance(failed, SnapshotError) and failed.partly_loaded,
        }
        return found, failed

    def _pass_on(self, text: str) -> None:
        """Lets the others have it: a disk that is full keeps no word from them."""
        if (board := self._board()) is not None:
            board.show(f"{self._key}/decided/{self._decisions}", text)
        else:
            self._directory.write_word(self._loaded, text.encode())

    def _passed_on(self) -> dict[str, Any]:
        board, path = self._board(), self._directory.path / self._loaded
        if board is not None:
            text = board.shown(f"{self._key}/decided/{self._decisions}")
        else:
            with reported(f"cannot read {path}", _WRITABLE):
                text = self._directory.files.read(path)
        if text is None:
            raise SnapshotError("there is no word of it; that trainer's log says why")
        found: dict[str, Any] = json.loads(text)
        return found

    def _take_away(self, name: str) -> None:
        """Nobody looks for it any more: one that stays is swept by the next run."""
        with contextlib.suppress(OSError):
            self._directory.remove_word(name)
