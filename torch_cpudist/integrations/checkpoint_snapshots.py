# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots that belong to files of another project, and come and go with them.

The other project's file says which snapshot has the servers' part of the same moment. A
snapshot's name begins with what the file's path hashes to, so that whoever replaces or
removes the file finds its snapshots without reading it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from torch_cpudist.errors import (
    ConfigurationError,
    InvalidArgumentError,
    SnapshotError,
)
from torch_cpudist.machine.urls import is_url
from torch_cpudist.optimizer.distributed import DistributedOptimizer
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory

#: Under which a checkpoint says where its snapshots are.
KEY = "cpudist_snapshots"
_PREFIX = "ckpt"
_HASH_DIGITS = 16


class Trainers(Protocol):
    """What trainers tell each other."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What one trainer has, on all."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor over all trainers."""


def directory_of(given: object) -> Path:
    """The directory that somebody has named.

    Raises:
        ConfigurationError: it is a URL.
        InvalidArgumentError: it is no path at all.
    """
    if isinstance(given, str) and is_url(given):
        raise ConfigurationError(
            f"snapshot_dir={given!r}: expected a directory that all processes share; "
            "checkpoints are put beside their snapshots, and these are written by "
            "servers. Copy both to the object store when fit() is over."
        )
    if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
        raise InvalidArgumentError(
            f"snapshot_dir={given!r}, expected the name of a directory"
        )
    return Path(os.fsdecode(given)).expanduser().absolute()


def remote_tables(optimizers: Sequence[DistributedOptimizer]) -> list[str]:
    """Names of the tables whose rows are on servers only."""
    return [
        table.found.name
        for one in optimizers
        for table in one.trained.placement.tables
        if table.found.remote
    ]


def _hashed(file: str | os.PathLike[str]) -> str:
    """The beginning of the names of a file's snapshots."""
    text = os.fspath(file)
    text = text if is_url(text) else os.path.abspath(text)
    return f"{_PREFIX}-{hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]}-"


def _says_when(opt: DistributedOptimizer) -> bool:
    """Whether this trainer calls ``save_snapshot``; else others do, without it."""
    return opt.leads or opt.driver.saving.in_step


def _told(record: object) -> tuple[str, list[str]]:
    """The directory and the names that a checkpoint has under ``KEY``.

    Raises:
        SnapshotError: something else is there.
    """
    found = record if isinstance(record, Mapping) else {}
    directory, named = found.get("directory"), found.get("names")
    plain = isinstance(named, list) and all(isinstance(one, str) for one in named)
    if not isinstance(directory, str) or not isinstance(named, list) or not plain:
        raise SnapshotError(
            f"the checkpoint has {record!r} under {KEY!r}, expected a directory and "
            "names of snapshots: it was changed, or written by another version."
        )
    for name in named:
        names.check_name(name)
    return directory, named


class CheckpointSnapshots:
    """Of the optimizers of one training. Collective but for ``forget``.

    Args:
        directory: where new ones are, one for all processes.
        trainers: tells all what one has.
    """

    def __init__(self, directory: Path, trainers: Trainers) -> None:
        self._directory = directory
        self._trainers = trainers

    def begin(self, opt: DistributedOptimizer) -> None:
        """Has an optimizer take part, anew whatever is in the directory.

        Raises:
            SnapshotError: its strategy has no snapshots.
            ConfigMismatchError: not all processes see the directory.
        """
        opt.resume(self._directory, load=False)

    def save(
        self,
        optimizers: Sequence[DistributedOptimizer],
        file: str | os.PathLike[str],
        step: int,
    ) -> dict[str, Any]:
        """Saves one of each optimizer, of this moment, that belong to a file.

        Args:
            optimizers: those that are trained, in one order on all trainers.
            file: the one that is about to be written.
            step: for the names.

        Returns:
            What the file has to say under ``KEY``.

        Raises:
            SnapshotError: one was not saved; on all trainers.
        """
        nonce = self._trainers.broadcast(secrets.token_hex(4))
        made = [
            f"{_hashed(file)}{step}-{nonce}-{index}" for index in range(len(optimizers))
        ]
        failed = ""
        for one, name in zip(optimizers, made, strict=True):
            if not _says_when(one):
                one.leave()  # its state is saved, and nobody waits for its next step
            elif not failed:
                try:
                    one.save_snapshot(name)
                except SnapshotError as error:
                    failed = str(error)
        self._raise_of_all(failed)
        for one in optimizers:
            if not _says_when(one) and one.trained.bounded:
                one.join()
        return {"directory": str(self._directory), "names": made}

    def _raise_of_all(self, failed: str) -> None:
        worst = self._trainers.reduce(torch.tensor(int(bool(failed))), None, "max")
        if not int(worst):
            return
        told = self._trainers.broadcast(failed)
        raise SnapshotError(
            failed
            or (f"trainer 0: {told}" if told else "another trainer could not save")
        )

    def load(
        self,
        optimizers: Sequence[DistributedOptimizer],
        record: object,
        values_of: Sequence[str] | None = None,
    ) -> None:
        """Brings back what a checkpoint names.

        Args:
            optimizers: those that were saved, in the same order.
            record: what it has under ``KEY``.
            values_of: tables, of which values are taken and nothing else; ``None``: the
                run goes back to that moment.

        Raises:
            SnapshotError: one is not where it was, or is of other optimizers; on all
                trainers. Nothing was changed.
            SnapshotCorruptError: a file of one is damaged.
        """
        directory, named = _told(record)
        if len(named) != len(optimizers):
            raise SnapshotError(
                f"the checkpoint is of {len(named)} optimizers, here are "
                f"{len(optimizers)}: load it with the module that has saved it."
            )
        folders = [self._found(directory, name) for name in named]
        for one, folder in zip(optimizers, folders, strict=True):
            if values_of is None:
                one.load_snapshot(folder)
            elif mine := [name for name in remote_tables([one]) if name in values_of]:
                one.load_snapshot(folder, only=mine)

    def _found(self, recorded: str, name: str) -> str:
        """Where trainer 0 sees a snapshot: here, or where it was saved."""
        places = list(dict.fromkeys([self._directory, Path(recorded)]))
        there = [one for one in places if Directory(one).is_there(name)]
        found = self._trainers.broadcast(str(there[0] / name) if there else "")
        if not found:
            looked = " or ".join(str(one / name) for one in places)
            raise SnapshotError(
                f"the checkpoint's values on servers are in snapshot {name!r}, which "
                f"is not there: expected {looked}. Put the snapshot's directory back, "
                "or take another checkpoint. Nothing was changed."
            )
        return str(found)

    def belonging(self, file: str | os.PathLike[str]) -> list[str]:
        """Names of the snapshots of a file, and of what was begun of one."""
        directory, begins = Directory(self._directory), _hashed(file)
        there = [*directory.names(), *directory.uncommitted()]
        return [name for name in there if name.startswith(begins)]

    def forget(
        self, file: str | os.PathLike[str], named: Sequence[str] | None = None
    ) -> list[str]:
        """Removes snapshots of a file that is gone or replaced; on trainer 0.

        Args:
            file: that one.
            named: those that go, if they are still there; default all of the file.

        Returns:
            Names of those removed.

        Raises:
            SnapshotError: the file system refuses.
        """
        directory = Directory(self._directory)
        gone = [name for name in self.belonging(file) if named is None or name in named]
        for name in gone:
            directory.remove(name)
        return gone
