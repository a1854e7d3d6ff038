# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every call of this folder that touches the file system.

One object, so that tests can put one in its place that fails, or ends the program, at
any of its calls.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch_cpudist.errors import SnapshotError

Contents = bytes | bytearray | memoryview


class Files:
    """The file system. Every method is one step that may fail with ``OSError``.

    Thread safety: any number of threads.
    """

    def make_directory(self, path: Path) -> None:
        """Makes a directory and those above it, where they are missing."""
        path.mkdir(parents=True, exist_ok=True)

    def remove_directory(self, path: Path) -> None:
        """Removes an empty directory."""
        path.rmdir()

    def list(self, path: Path) -> list[str]:
        """Names in a directory, sorted; none where it does not exist."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: Path) -> int | None:
        """Bytes of a regular file; ``None`` for what is none, or not there."""
        try:
            return path.stat().st_size if path.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def create(self, path: Path) -> int:
        """Opens an empty file for writing, in the place of what stood there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        return os.open(path, flags, 0o644)

    def write(self, file: int, contents: Contents) -> None:
        """Writes all of it."""
        rest = memoryview(contents).cast("B")
        while rest:
            rest = rest[os.write(file, rest) :]

    def sync(self, file: int) -> None:
        """Returns when the contents of a file outlive a crash."""
        os.fsync(file)

    def sync_file(self, path: Path) -> None:
        """``sync`` of a file that another function has written."""
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def close(self, file: int) -> None:
        """Closes a file."""
        os.close(file)

    def sync_directory(self, path: Path) -> None:
        """Returns when the names in a directory outlive a crash."""
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def rename(self, old: Path, new: Path) -> None:
        """Gives a file another name, in the place of what has it."""
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        """Removes a file, unless somebody else has."""
        path.unlink(missing_ok=True)

    def read(self, path: Path) -> bytes:
        """The whole of a small file."""
        return path.read_bytes()

    def map(self, path: Path) -> memoryview:
        """A file as memory that is read where it is looked at. Costs no memory."""
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(number).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(number, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(number)


def write_durably(files: Files, path: Path, contents: Iterable[Contents]) -> None:
    """Writes a file that outlives a crash, its name included, or leaves none.

    It stands under another name until it is whole, so that nobody meets a part of it.

    Args:
        files: the file system.
        path: the file.
        contents: pieces, one after the other.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        file = files.create(unfinished)
        try:
            for piece in contents:
                files.write(file, piece)
            files.sync(file)
        finally:
            files.close(file)
        files.rename(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            files.unlink(unfinished)
        raise
    files.sync_directory(path.parent)


@contextlib.contextmanager
def reported(doing: str, remedy: str) -> Iterator[None]:
    """Turns an ``OSError`` into a ``SnapshotError`` that says what was being done.

    Args:
        doing: what cannot be done if it fails, as in "cannot write …".
        remedy: what to do about it.
    """
    try:
        yield
    except OSError as error:
        cause = error.strerror or str(error)
        raise SnapshotError(f"{doing}: {cause}. {remedy}") from error
