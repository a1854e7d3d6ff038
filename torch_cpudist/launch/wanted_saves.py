# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots that servers ask for before they end: files in the directory of snapshots.

Trainers ask servers, and never the other way; what both see is that directory. A
server that is about to end leaves a file for each optimizer that saves there by itself;
trainer 0 looks for it between two steps, and removes it once a snapshot of later was
committed.
"""

from __future__ import annotations

from pathlib import Path

from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.files import Files, reported

_FILES = Files()
_SHARED = "See that the directory can be read and written on this host."


class WantedSaves:
    """Of one run. Thread safety: any number of threads and processes."""

    def __init__(self, directory: Path, run_id: int, files: Files = _FILES) -> None:
        """Asks for nothing yet.

        Args:
            directory: of snapshots.
            run_id: of the run.
            files: the file system.
        """
        self._directory = directory
        self._run_id = run_id
        self._files = files
        self._asked: list[Path] = []

    def _path(self, number: int) -> Path:
        return self._directory / names.wanted_name(self._run_id, number)

    # -- a server ----------------------------------------------------------------------

    def ask(self) -> list[int]:
        """Asks for a snapshot of every optimizer that has begun in this run.

        Returns:
            Their numbers; none where nobody looks.

        Raises:
            SnapshotError: the file system refuses.
        """
        with reported(f"cannot write to {self._directory}", _SHARED):
            found = self._files.list(self._directory)
            numbers = sorted(
                number
                for name in found
                if (number := names.begun_number(name, self._run_id)) is not None
            )
            for number in numbers:
                self._asked.append(self._path(number))
                # Its name says all; several servers may make it at the same time.
                self._files.close(self._files.create(self._asked[-1]))
        return numbers

    def answered(self) -> bool:
        """Whether all that was asked for is there.

        Raises:
            SnapshotError: the directory cannot be read.
        """
        with reported(f"cannot read {self._directory}", _SHARED):
            return all(self._files.size(path) is None for path in self._asked)

    def withdraw(self) -> None:
        """Asks no more."""
        with reported(f"cannot write to {self._directory}", _SHARED):
            for path in self._asked:
                self._files.unlink(path)

    # -- trainer 0 ---------------------------------------------------------------------

    def wanted(self, number: int) -> bool:
        """Whether a server has asked for a snapshot of an optimizer.

        Raises:
            SnapshotError: the directory cannot be read.
        """
        path = self._path(number)
        with reported(f"cannot read {path}", _SHARED):
            return self._files.size(path) is not None

    def answer(self, number: int) -> None:
        """One of later is committed.

        Raises:
            SnapshotError: the file system refuses.
        """
        path = self._path(number)
        with reported(f"cannot remove {path}", _SHARED):
            self._files.unlink(path)
