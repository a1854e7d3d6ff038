# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class: what there is, how one comes and goes
"""A directory of snapshots: which there are, and how one comes and goes.

A snapshot is a directory with a ``manifest.json`` in it. That file is written last, in
one step, and removed first: whatever ends the program, a snapshot is there as a whole
or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path

from torch_cpudist._version import __version__
from torch_cpudist.errors import SnapshotError
from torch_cpudist.log import logger
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.chain import (
    Found,
    arranged,
    chain_of,
    superfluous,
    unreadable,
)
from torch_cpudist.snapshot.files import Files, reported, write_durably
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.sealed import checksum_of

_FILE_SYSTEM = Files()
_SPACE = "See that the directory exists on this host, can be written and has space"
_WRITABLE = f"{_SPACE}; training goes on without this snapshot."
_READABLE = "See that the directory can be read on this host."


class Directory:
    """Snapshots that lie side by side. Only one process, trainer 0, may change them.

    Args:
        path: the directory; need not be there to be read.
        files: the file system.
    """

    def __init__(
        self, path: str | os.PathLike[str], files: Files = _FILE_SYSTEM
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        self.files = files
        self._told: set[str] = set()  # whose manifest cannot be read, it was warned

    def folder(self, name: str) -> Path:
        """Where a snapshot's files are.

        Raises:
            InvalidArgumentError: no snapshot can be called so.
        """
        return self.path / names.check_name(name)

    # ---- what there is -------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of all committed snapshots, by the alphabet.

        Raises:
            SnapshotError: the directory cannot be read.
        """
        return [name for name, committed in self._folders() if committed]

    def uncommitted(self) -> list[str]:
        """Names of directories of snapshots that were begun and never committed."""
        return [name for name, committed in self._folders() if not committed]

    def _folders(self) -> list[tuple[str, bool]]:
        with reported(f"cannot list snapshots in {self.path}", _READABLE):
            found = []
            for name in self.files.list(self.path):
                try:
                    folder = self.folder(name)
                except ValueError:
                    continue
                if self.files.size(folder) is None:  # no file of that name
                    committed = self.files.size(folder / names.MANIFEST) is not None
                    found.append((name, committed))
            return found

    def is_there(self, name: str) -> bool | None:
        """Whether a snapshot is committed; ``None`` if nothing of it is there.

        Raises:
            SnapshotError: the directory cannot be read.
        """
        folder = self.folder(name)
        with reported(f"cannot read {folder}", _READABLE):
            if self.files.size(folder / names.MANIFEST) is not None:
                return True
            return False if self.files.list(folder) else None

    def manifest(self, name: str) -> Manifest:
        """Reads the manifest of a snapshot, all of which is checked.

        Raises:
            SnapshotError: there is no such snapshot, or it is of a later format.
            SnapshotCorruptError: the manifest is damaged.
        """
        path = self.folder(name) / names.MANIFEST
        with reported(f"cannot read {path}", _READABLE):
            if self.files.size(path) is None:
                known = self.names() or "none"
                raise SnapshotError(
                    f"no snapshot {name!r} in {self.path}, where there are {known}"
                )
            contents = self.files.read(path)
        return Manifest.from_json(contents, name)

    def committed(self, param_set: int | None = None) -> list[Found]:
        """All committed snapshots, the newest first, and damaged ones behind them.

        Those whose chain is broken are among the damaged ones.

        Args:
            param_set: those of one of the run's optimizers; damaged ones may be of any.

        Raises:
            SnapshotError: the directory cannot be read.
        """
        manifests: dict[str, Manifest] = {}
        damaged = []
        for name in self.names():
            try:
                manifests[name] = self.manifest(name)
            except SnapshotError as error:
                damaged.append(Found(name, None, error))

        return arranged(manifests, damaged, param_set)

    def newest(self, param_set: int = 0) -> str | None:
        """The name of the snapshot that was committed last, of those that can be read.

        One whose manifest is damaged, or that of one it needs, is passed over with a
        warning.

        Raises:
            SnapshotError: the directory cannot be read.
        """
        found = self.committed(param_set)
        for one in found:
            if one.damage is not None:
                logger.warning("snapshot %s is passed over: %s", one.name, one.damage)
        return next((one.name for one in found if one.damage is None), None)

    # ---- how one comes -------------------------------------------------------------

    def prepare(self, name: str) -> Path:
        """Makes an empty directory for a snapshot that is about to be taken.

        What an earlier attempt of the same name has left behind goes.

        Returns:
            The directory.

        Raises:
            SnapshotError: a snapshot of that name is there, or the file system refuses.
        """
        folder = self.folder(name)
        with reported(f"snapshot {name}: cannot make {folder}", _WRITABLE):
            self.files.make_directory(self.path)
            if self.files.size(folder / names.MANIFEST) is not None:
                raise SnapshotError(
                    f"snapshot {name!r} is in {self.path} already, and none is ever "
                    "overwritten. Take another name, or remove its directory."
                )
            self._empty(folder)
            self.files.make_directory(folder)
            self.files.sync_directory(self.path)
        return folder

    def begin(self, name: str) -> None:
        """Makes the directory of a snapshot, before anybody may give that up.

        Where it cannot be made, who writes to it will say so.
        """
        with contextlib.suppress(OSError):
            self.files.make_directory(self.folder(name))

    def end(self, name: str) -> None:
        """Removes that again, if nothing was written to it."""
        with contextlib.suppress(OSError):
            self.files.remove_directory(self.folder(name))

    def commit(self, manifest: Manifest, place: int | None = None) -> Manifest:
        """Makes a snapshot exist, whose other files are written and synchronised.

        Args:
            manifest: what it consists of; ``commit``, ``time``, ``package`` and
                ``crc32c`` are filled in.
            place: its ``commit``; ``None``: it is the newest.

        Returns:
            The manifest as it was written.

        Raises:
            SnapshotError: a file is missing or of another size than the manifest says,
                what it is put over is not there, or the file system refuses. There is
                no such snapshot then, or, if the very last step failed, it may be there
                as a whole.
        """
        folder = self.folder(manifest.name)
        with reported(f"snapshot {manifest.name}: cannot commit {folder}", _WRITABLE):
            if self.files.size(folder / names.MANIFEST) is not None:
                raise SnapshotError(
                    f"snapshot {manifest.name!r} in {self.path} is committed already"
                )
            self._check_sizes(folder, manifest)
            last = max(
                (one.manifest.commit for one in self.committed() if one.manifest),
                default=0,
            )
            now = datetime.now(UTC).isoformat(timespec="seconds")
            committed = dataclasses.replace(
                manifest,
                commit=last + 1 if place is None else place,
                time=now,
                package=__version__,
            )
            chain_of(committed, self.manifest)
            contents = committed.to_json()
            self.files.sync_directory(folder)
            self.files.sync_directory(self.path)
            write_durably(self.files, folder / names.MANIFEST, [contents])
            if self.files.read(folder / names.MANIFEST) != contents:
                raise SnapshotError(
                    f"snapshot {manifest.name}: {folder / names.MANIFEST} does not "
                    "read back as it was written. Look at the disk."
                )
        return dataclasses.replace(committed, crc32c=checksum_of(contents))

    def _check_sizes(self, folder: Path, manifest: Manifest) -> None:
        expected = {one.name: one.bytes for one in manifest.files}
        expected |= {one.file: one.bytes for one in manifest.trainers}
        for name, size in expected.items():
            found = self.files.size(folder / name)
            if found != size:
                what = "is not there" if found is None else f"has {found}"
                raise SnapshotError(
                    f"snapshot {manifest.name}: {folder / name} should have {size} "
                    f"bytes and {what}. All processes have to see one directory."
                )

    # ---- how one goes --------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Removes a snapshot, or what was begun of one.

        Raises:
            SnapshotError: the file system refuses; the snapshot may be gone, then.
        """
        folder = self.folder(name)
        with reported(f"snapshot {name}: cannot remove {folder}", _READABLE):
            if self.files.size(folder / names.MANIFEST) is not None:
                self.files.unlink(folder / names.MANIFEST)
                # Else a crash might bring the name back, and not what it names.
                self.files.sync_directory(folder)
            self._empty(folder)

    def _empty(self, folder: Path) -> None:
        """Removes a directory with the files that are made here, if there is one.

        One with something else in it stays, with that in it.
        """
        found = self.files.list(folder)
        for name in found:
            if names.is_own(name):
                self.files.unlink(folder / name)
        if self.files.list(folder):
            logger.warning("%s has files of others in it and stays", folder)
        elif folder.name in self.files.list(self.path):
            self.files.remove_directory(folder)
            self.files.sync_directory(self.path)

    def keep(
        self, count: int, param_set: int = 0, spared: Collection[str] = ()
    ) -> list[str]:
        """Removes all but the newest snapshots that nobody gave a name.

        Those that can be read count, and what they are put over stays with them. A base
        goes after all that is put over it. A manifest that the file system does not let
        be read is a warning, once: what it may be put over stays, the rest goes.

        Args:
            count: how many stay, at least 1. Named ones do not count and stay.
            param_set: of which optimizer.
            spared: what stays until the next time, with what that is put over.

        Returns:
            The names of those removed, in their order.

        Raises:
            SnapshotError: the file system refuses.
        """
        there = self.committed(param_set)
        old = superfluous(there, count, spared)
        for one in unreadable(there):
            if one.name not in self._told:
                self._told.add(one.name)
                logger.warning(
                    "snapshot %s and older ones of its run that it may need stay "
                    "beyond keep=%d: %s",
                    one.name,
                    count,
                    one.damage,
                )
        for name in old:
            self.remove(name)
        return old

    def sweep(self, run_id: int = 0, param_set: int = 0) -> list[str]:
        """Removes what saves that did not end have left; before any save begins.

        Directories without a manifest whose name was made here, whatever their number:
        what a killed run was writing is newer than all that it has committed. Tokens,
        rows on their way to servers, and what trainers of other runs left behind. Those
        that other optimizers of this run may be writing stay, and names of users.

        Args:
            run_id: of the run that goes on.
            param_set: which of its optimizers asks, and has begun no save.

        Returns:
            The names of those removed.

        Raises:
            SnapshotError: the file system refuses.
        """
        swept = []
        own = names.run_token(run_id, "")  # others may be writing one at this moment
        for name in self.uncommitted():
            if names.number_of(name) is None:
                continue
            if not names.may_be_going_on(name, run_id, param_set):
                self.remove(name)
                swept.append(name)
        with reported(f"cannot remove tokens in {self.path}", _WRITABLE):
            for name in self.files.list(self.path):
                empty = self.files.size(self.path / name) == 0
                of_others = names.is_run_token(name, run_id) is False
                left = empty and name.startswith(names.TOKEN)
                if of_others or (left and not name.startswith(own)):
                    self.files.unlink(self.path / name)
                    swept.append(name)
                elif names.is_staged(name):
                    for rows in self.files.list(self.path / name):
                        if names.is_staged_file(rows):
                            self.files.unlink(self.path / name / rows)
                    inside = Directory(self.path / name, self.files)
                    for copied in [*inside.names(), *inside.uncommitted()]:
                        inside.remove(copied)
                    if not self.files.list(self.path / name):
                        self.files.remove_directory(self.path / name)
                        swept.append(name)
        return swept + self._sweep_left(names.left_name(run_id, 0)[:-1])

    def _sweep_left(self, own: str) -> list[str]:
        """Removes directories of trainers that had left, but for those of a run."""
        swept = []
        with reported(f"cannot remove states of trainers in {self.path}", _WRITABLE):
            for name in self.files.list(self.path):
                folder = self.path / name
                mine = name.startswith(own) or not name.startswith(names.LEFT)
                if not mine and self.files.size(folder) is None:
                    self._empty(folder)
                    swept.append(name)
        return swept

    # ---- one directory for all -----------------------------------------------------

    @contextlib.contextmanager
    def token(self) -> Iterator[str]:
        """An empty file that every process has to see, if all mean one directory.

        Yields:
            Its name.

        Raises:
            SnapshotError: the file system refuses.
        """
        name = names.TOKEN + secrets.token_hex(8)
        with reported(f"cannot write to {self.path}", _WRITABLE):
            self.files.make_directory(self.path)
            self.files.close(self.files.create(self.path / name))
            self.files.sync_directory(self.path)
        try:
            yield name
        finally:
            with contextlib.suppress(OSError):
                self.files.unlink(self.path / name)

    def sees(self, token: str) -> bool:
        """Whether the file of a token is there."""
        return self.files.size(self.path / token) is not None

    # ---- words between trainers, each a small file ---------------------------------

    def write_word(self, name: str, contents: bytes) -> None:
        """Leaves a file for the others, which see it as a whole or not at all.

        Nothing is written into an empty one: a disk that is full has names left.

        Raises:
            SnapshotError: the file system refuses.
        """
        with reported(f"cannot write to {self.path}", f"{_SPACE}."):
            self.files.make_directory(self.path)
            pieces = [contents] if contents else []
            write_durably(self.files, self.path / name, pieces)

    def remove_word(self, name: str) -> None:
        """Takes it away again, if it is there.

        Raises:
            OSError: the file system refuses. What that means, the caller knows: others
                may have to see it gone, or find out by themselves that it is of no use.
        """
        if self.sees(name):
            self.files.unlink(self.path / name)
