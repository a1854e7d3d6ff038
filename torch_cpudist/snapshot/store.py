# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class, as the directory's: what there is, how one comes, goes back and goes
"""Snapshots in an object store, by fsspec: copies of those of a local directory.

A snapshot is there as below a directory, ``PREFIX/NAME/FILE``. Its manifest is put last
and, when it goes, removed first: that one object makes it exist.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from torch_cpudist.errors import Error, SnapshotCorruptError, SnapshotError
from torch_cpudist.log import logger
from torch_cpudist.machine.urls import system_of
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.chain import Found, arranged, chain_of, superfluous
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.entries import CHUNK_BYTES
from torch_cpudist.snapshot.files import reported, write_durably
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.mapped import Mapped
from torch_cpudist.snapshot.trainer_files import open_trainer

_WRITABLE = "See that the directory can be written and has space."


class Store:
    """Of one URL. Only one process, who commits snapshots, may change it.

    Attributes:
        url: as it was given.
        system: the file system.
        root: what that calls the prefix.

    Args:
        url: of the prefix below which snapshots are.

    Raises:
        ConfigurationError: fsspec or its driver of the scheme is not installed.
        SnapshotError: the file system cannot be had.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.system, root = system_of(self.url, {}, SnapshotError)
        self.root = root.rstrip("/")

    @contextlib.contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        """Raises what a driver raises, of whatever class, as our own."""
        try:
            yield
        except Error:
            raise
        except Exception as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise SnapshotError(
                f"cannot {doing} in {self.url}: {why}. See that it is there and that "
                "fsspec's configuration gives this process the right to it."
            ) from error

    def probe(self) -> None:
        """Sees that it can be written, and removes that again.

        Raises:
            SnapshotError: it cannot.
        """
        token = f"{self.root}/{names.TOKEN}{secrets.token_hex(8)}"
        with self._failures("write"):
            self._make_directory(self.root)
            self.system.pipe_file(token, b"")
            self.system.rm_file(token)

    def _make_directory(self, path: str) -> None:
        # Object stores have none, and what they would make is a bucket.
        if path.startswith("/"):
            self.system.makedirs(path, exist_ok=True)

    def _at(self, name: str, file: str) -> str:
        return f"{self.root}/{names.check_name(name)}/{file}"

    # ---- what there is -------------------------------------------------------------

    def _names(self) -> list[str]:
        """Names of all snapshots, also of those that were begun and never committed."""
        with self._failures("list snapshots"):
            self.system.invalidate_cache()
            try:
                found = self.system.ls(self.root, detail=True)
            except FileNotFoundError:
                return []
        last = [
            one["name"].rstrip("/").rpartition("/")[2]
            for one in found
            if one["type"] == "directory"
        ]
        return sorted(name for name in last if names.is_name(name))

    def _files(self, name: str) -> list[str]:
        with self._failures(f"list the files of snapshot {name!r}"):
            self.system.invalidate_cache()
            try:
                found = self.system.ls(f"{self.root}/{name}", detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(one).rpartition("/")[2] for one in found)

    def manifest(self, name: str) -> Manifest | None:
        """Reads the manifest of a snapshot; ``None`` if there is no such one.

        Raises:
            SnapshotError: the store cannot be read, or it is of a later format.
            SnapshotCorruptError: it is damaged.
        """
        contents = self._manifest(name)
        return None if contents is None else Manifest.from_json(contents, name)

    def _manifest(self, name: str) -> bytes | None:
        with self._failures(f"read the manifest of snapshot {name!r}"):
            try:
                return bytes(self.system.cat_file(self._at(name, names.MANIFEST)))
            except FileNotFoundError:
                return None

    def has(self, name: str) -> bool:
        """Whether there is a snapshot of a name, damaged ones too.

        Raises:
            SnapshotError: the store cannot be read.
        """
        return self._manifest(name) is not None

    def committed(self, param_set: int | None = None) -> list[Found]:
        """All committed snapshots, the newest first, and damaged ones behind them.

        Args:
            param_set: those of one of the run's optimizers; damaged ones may be of any.

        Raises:
            SnapshotError: the store cannot be read.

        Cost: a request each.
        """
        manifests, damaged = {}, []
        for name in self._names():
            contents = self._manifest(name)
            if contents is None:
                continue
            try:
                manifests[name] = Manifest.from_json(contents, name)
            except SnapshotError as error:  # damaged, or of a later format
                damaged.append(Found(name, None, error))
        return arranged(manifests, damaged, param_set)

    # ---- how one comes -------------------------------------------------------------

    def put(self, directory: Directory, name: str) -> None:
        """Copies a committed snapshot of a directory to the store, its manifest last.

        What it is put over, and is not there, comes first.

        Raises:
            SnapshotError: a file cannot be read, or the store refuses; there is no such
                snapshot in it then, or, if the very last step failed, the whole one.
        """
        chain = chain_of(directory.manifest(name), directory.manifest)
        for member in reversed(chain):
            self._put(directory, member.name)

    def _put(self, directory: Directory, name: str) -> None:
        folder, files = directory.folder(name), directory.files
        with reported(f"cannot read {folder / names.MANIFEST}", _WRITABLE):
            contents = files.read(folder / names.MANIFEST)
        there = self._manifest(name)
        if there is not None:
            if there == contents:
                return
            raise SnapshotError(
                f"another snapshot {name!r} is in {self.url} already, and none is ever "
                "overwritten. Take another name, or remove it there."
            )
        own = [one for one in files.list(folder) if names.is_own(one)]
        with self._failures(f"write snapshot {name!r}"):
            self._make_directory(f"{self.root}/{name}")
            for file in own:
                if file == names.MANIFEST or file.endswith(".tmp"):
                    continue
                self.system.put_file(str(folder / file), self._at(name, file))
            self._check_sizes(directory, name, contents)
            self.system.pipe_file(self._at(name, names.MANIFEST), contents)

    def _check_sizes(self, directory: Directory, name: str, contents: bytes) -> None:
        """Looks at all that a manifest names, right before that makes it count."""
        manifest = Manifest.from_json(contents, name)
        expected: dict[str, int | None] = {f.name: f.bytes for f in manifest.files}
        for trainer in manifest.trainers:
            expected[trainer.file] = trainer.bytes
            beside = names.trainer_name(trainer.rank, "safetensors")
            expected[beside] = directory.files.size(directory.folder(name) / beside)
        self.system.invalidate_cache()
        there = self.system.ls(f"{self.root}/{name}", detail=True)
        found = {str(one["name"]).rpartition("/")[2]: one["size"] for one in there}
        for file, size in expected.items():
            if size is None or found.get(file) != size:
                has = f"has {found[file]}" if file in found else "is not there"
                raise SnapshotError(
                    f"snapshot {name}: {file} should have {size} bytes in {self.url} "
                    f"and {has}. See that nothing but this run removes files there and "
                    f"in {directory.path}."
                )

    # ---- how one goes back ---------------------------------------------------------

    def get(self, directory: Directory, name: str) -> None:
        """Copies a snapshot to a directory where it is not, verified; manifest last.

        What it is put over, and is not there, comes first.

        Raises:
            SnapshotCorruptError: a file of it is damaged or missing.
            SnapshotError: there is none, or one of the two file systems refuses.
        """
        contents = self._manifest(name)
        if contents is None:
            known = [one.name for one in self.committed()] or "none"
            raise SnapshotError(
                f"no snapshot {name!r} in {self.url}, where there are {known}"
            )
        newest = Manifest.from_json(contents, name)
        for member in reversed(chain_of(newest, self._member)):
            if not self._is_here(directory, member.name):
                self._get(directory, member)

    def mend(self, directory: Directory, name: str) -> bool:
        """Gets anew what is damaged in a directory, of a snapshot that is whole here.

        Returns:
            Whether there is such a one; it is whole in the directory then.

        Raises:
            SnapshotCorruptError: it is damaged in both.
            SnapshotError: one of the two file systems refuses.

        Cost: reads all of it in the directory.
        """
        contents = self._manifest(name)
        if contents is None:
            return False
        newest = Manifest.from_json(contents, name)
        for member in reversed(chain_of(newest, self._member)):
            if self._is_here(directory, member.name):
                try:
                    _check(directory.folder(member.name), member, directory)
                except SnapshotError as error:
                    self._give_way(directory, member.name, error)
                else:
                    continue
            self._get(directory, member)
        return True

    def _is_here(self, directory: Directory, name: str) -> bool:
        """Whether a directory has the same manifest; a damaged one goes.

        Raises:
            SnapshotError: another snapshot has that name there.
        """
        path = directory.folder(name) / names.MANIFEST
        with reported(f"cannot read {path}", _WRITABLE):
            if directory.files.size(path) is None:
                return False
            contents = directory.files.read(path)
        if contents == self._manifest(name):
            return True
        try:
            Manifest.from_json(contents, name)
        except SnapshotCorruptError as error:
            self._give_way(directory, name, error)
            return False
        raise SnapshotError(
            f"snapshot {name!r} in {directory.path} is another one than that in "
            f"{self.url}, and none is ever overwritten. Remove one of them."
        )

    def _give_way(self, directory: Directory, name: str, error: SnapshotError) -> None:
        logger.warning("%s It is copied from %s again.", error, self.url)
        directory.remove(name)

    def _member(self, name: str) -> Manifest:
        manifest = self.manifest(name)
        if manifest is None:
            raise SnapshotError(f"it is not in {self.url}")
        return manifest

    def _get(self, directory: Directory, manifest: Manifest) -> None:
        name = manifest.name
        contents = self._manifest(name)
        if contents is None:
            raise SnapshotError(f"snapshot {name!r} was removed from {self.url}")
        folder, files = directory.prepare(name), directory.files
        try:
            for file in self._files(name):
                if names.is_own(file) and file != names.MANIFEST:
                    self._get_file(self._at(name, file), folder / file)
            _check(folder, manifest, directory)
            doing = f"snapshot {name}: cannot write to {folder}"
            with reported(doing, _WRITABLE):
                files.sync_directory(folder)
                write_durably(files, folder / names.MANIFEST, [contents])
        except SnapshotError:
            with contextlib.suppress(SnapshotError):
                directory.remove(name)
            raise

    def _get_file(self, source: str, target: Path) -> None:
        with self._failures(f"read {source}"):
            self.system.get_file(source, str(target))

    def get_newest(self, directory: Directory, param_set: int) -> str | None:
        """Copies the newest whole snapshot here, if the directory has none as new.

        A damaged one is passed over with a warning.

        Returns:
            Its name; ``None`` if nothing was copied.

        Raises:
            SnapshotCorruptError: there are some, here and there, and none is whole.
            SnapshotError: the store cannot be read, or the directory not be written.
        """
        there = [one for one in directory.committed(param_set) if one.damage is None]
        here = {one.name for one in there}
        newest = max((one.order for one in there), default=None)
        damaged: SnapshotError | None = None
        everything = self.committed(param_set)
        unreadable = [one.damage for one in everything if one.damage is not None]
        for error in unreadable:
            logger.warning("%s: %s It is passed over.", self.url, error)
        for found in everything:
            if found.damage is not None:
                continue
            if found.name in here or (newest is not None and newest >= found.order):
                return None
            try:
                self.get(directory, found.name)
            except SnapshotCorruptError as error:
                damaged = damaged or error
                logger.warning("%s: %s It is passed over.", self.url, error)
                continue
            logger.info("snapshot %s: copied from %s", found.name, self.url)
            return found.name
        damaged = damaged or next(iter(unreadable), None)
        if damaged is not None and not here:
            raise damaged
        return None

    # ---- how one goes --------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Removes a snapshot, or what was begun of one.

        Raises:
            SnapshotError: the store refuses; the snapshot may be gone, then.
        """
        files = self._files(name)
        with self._failures(f"remove snapshot {name!r}"):
            if names.MANIFEST in files:
                self.system.rm_file(self._at(name, names.MANIFEST))
            for file in files:
                if names.is_own(file) and file != names.MANIFEST:
                    self.system.rm_file(self._at(name, file))
            with contextlib.suppress(Exception):  # stores have no empty directories
                self.system.rmdir(f"{self.root}/{name}")

    def keep(self, count: int, param_set: int = 0) -> list[str]:
        """Removes all but the newest snapshots that nobody gave a name.

        As ``Directory.keep``: what those that stay are put over stays with them.

        Args:
            count: how many stay, at least 1. Named ones do not count and stay.
            param_set: of which optimizer.

        Returns:
            The names of those removed, in their order.

        Raises:
            SnapshotError: the store refuses.
        """
        old = superfluous(self.committed(param_set), count)
        for name in old:
            self.remove(name)
        return old

    def sweep(self, run_id: int = 0, param_set: int = 0) -> list[str]:
        """Removes what copies that did not end have left, as ``Directory.sweep``.

        Raises:
            SnapshotError: the store refuses.
        """
        swept = []
        for name in self._names():
            if names.number_of(name) is None or self.has(name):
                continue
            if not names.may_be_going_on(name, run_id, param_set):
                self.remove(name)
                swept.append(name)
        return swept


def _check(folder: Path, manifest: Manifest, directory: Directory) -> None:
    """Checks every byte of a snapshot that has no manifest here yet."""
    for file in manifest.files:
        path = folder / file.name
        mapped = Mapped(directory.files, path, file.bytes, file.crc32c, CHUNK_BYTES)
        mapped.check_all()
    for trainer in manifest.trainers:
        text, tensors, _ = open_trainer(folder, trainer, directory.files)
        text.check_all()
        tensors.check_all()
    with reported(f"cannot synchronise {folder}", _WRITABLE):
        for name in directory.files.list(folder):
            directory.files.sync_file(folder / name)
