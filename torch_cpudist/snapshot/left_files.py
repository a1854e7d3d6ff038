# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""States of trainers that have left: for the snapshots of those who train on.

A trainer that leaves writes its own state to a directory beside the snapshots, before
any server lets it go. Who commits a snapshot that it has no part in copies that.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch_cpudist import _core
from torch_cpudist.errors import SnapshotCorruptError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.checked_json import parse
from torch_cpudist.snapshot.files import Files, reported, write_durably
from torch_cpudist.snapshot.manifest import Trainer
from torch_cpudist.snapshot.trainer_files import (
    open_trainer,
    read_written,
    write_trainer,
)
from torch_cpudist.snapshot.trees import Packed

_READABLE = "See that the directory can be read and written on this host."


class LeftFiles:
    """Those of one optimizer of one run. Thread safety: any number of threads.

    Args:
        directory: of snapshots.
        run_id: of the run: those of another one are never taken.
        param_set: which of the run's optimizers.
        files: the file system.
    """

    def __init__(
        self, directory: Path, run_id: int, param_set: int, files: Files
    ) -> None:
        self._folder = directory / names.left_name(run_id, param_set)
        self._run_id = run_id
        self._files = files

    def write(self, rank: int, packed: Packed, steps: int) -> None:
        """Writes the state of a trainer that is about to leave.

        Raises:
            SnapshotError: the file system refuses.
        """
        files, run_id = self._files, self._run_id
        write_trainer(self._folder, rank, packed, steps, files, run_id=run_id)

    def forget(self, rank: int) -> None:
        """Removes the state of a trainer that has begun anew; the JSON first.

        Raises:
            SnapshotError: the file system refuses.
        """
        with reported(f"cannot remove files of {self._folder}", _READABLE):
            for suffix in ("json", "safetensors"):
                path = self._folder / names.trainer_name(rank, suffix)
                if self._files.size(path) is not None:
                    self._files.unlink(path)

    def bring(self, folder: Path, rank: int, number: int) -> Trainer | None:
        """Copies the newest state of a trainer into a snapshot's directory.

        Args:
            folder: of the snapshot.
            rank: the trainer's.
            number: of the cut.

        Returns:
            What the manifest says of it; ``None`` if it has left none, or writes
            another one at this moment.

        Raises:
            SnapshotError: the file system refuses.
        """
        files = self._files
        with reported(f"cannot copy files of {self._folder}", _READABLE):
            try:
                left = read_written(self._folder, rank, files, run_id=self._run_id)
            except (SnapshotCorruptError, FileNotFoundError):
                return None
        if left is None:
            return None
        return self.bring_from(self._folder, left, folder, number)

    def bring_from(
        self, source: Path, left: Trainer, folder: Path, number: int
    ) -> Trainer | None:
        """Copies a state into a snapshot's directory, as one of this run.

        Args:
            source: the directory where it is.
            left: what is there.
            folder: of the snapshot.
            number: of the cut.

        Returns:
            What the manifest says of it; ``None`` if it is damaged, or not there any
            more.

        Raises:
            SnapshotError: the file system refuses.
        """
        files, rank = self._files, left.rank
        with reported(f"cannot copy files of {source}", _READABLE):
            try:
                text, data, _ = open_trainer(source, left, files)
                entry = parse(text.view(0, text.size_bytes))
                tensors = data.view(0, data.size_bytes)
                entry |= {"number": str(number), "run": names.run_text(self._run_id)}
            except (SnapshotCorruptError, FileNotFoundError):
                return None
            contents = json.dumps(entry).encode() + b"\n"
            files.make_directory(folder)
            beside = names.trainer_name(rank, "safetensors")
            write_durably(files, folder / beside, [tensors])
            write_durably(files, folder / left.file, [contents])
        checksum = _core.crc32c(contents)
        return Trainer(rank, left.file, len(contents), checksum, left.steps)
