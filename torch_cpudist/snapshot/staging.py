# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files of rows that are there only until servers have read them.

Servers read rows from their own directory of snapshots alone, in the order of the
table's own buckets. Rows of another directory, or of a table that had another name,
are written there anew, a file at a time.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from torch_cpudist import _core
from torch_cpudist.errors import SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.entries import CHUNK_BYTES
from torch_cpudist.snapshot.files import Files, reported
from torch_cpudist.snapshot.parts import COLUMNS, FORMAT, VERSION, Array, LoadRun
from torch_cpudist.snapshot.tensors import make_header

_DTYPES = {"keys": "I64", "count": "U32", "last_seen": "U32"}
_WRITABLE = "See that the directory can be written and has space."


@dataclass(frozen=True)
class Staged:
    """A file of rows for servers to read.

    Attributes:
        whole: all of its rows.
        bucket_begin: its first row of each of the 4096 buckets, and how many it has.
    """

    whole: LoadRun
    bucket_begin: Array

    def load_run(self, buckets: tuple[int, int]) -> LoadRun:
        """Its rows of a run of buckets; it may have none."""
        first, last = (int(self.bucket_begin[bucket]) for bucket in buckets)
        whole = self.whole
        return LoadRun(
            whole.file, whole.file_bytes, first, last, whole.offsets, whole.crc32c
        )


class Stage:
    """A place for such files. One at a time; by trainer 0 alone.

    Attributes:
        directory: of the servers.
        name: of the place in it, in the place of a snapshot's.
    """

    def __init__(self, directory: Directory) -> None:
        """Touches nothing yet."""
        self.directory = directory
        self.name = names.STAGED + secrets.token_hex(8)
        self._made = 0  # files, ever

    @property
    def _folder(self) -> Path:
        return self.directory.path / self.name

    @property
    def _files(self) -> Files:
        return self.directory.files

    @property
    def inside(self) -> Directory:
        """A directory for whole snapshots that come from elsewhere."""
        return Directory(self._folder, self._files)

    def put(self, columns: Mapping[str, Array], salt: int) -> Staged:
        """Writes rows, in the place of those before.

        Args:
            columns: by name, ``[rows, …]``: keys and weight, and of the others those
                that are to be loaded.
            salt: of the table that they come to.

        Raises:
            SnapshotError: the file system refuses.
        """
        keys = columns["keys"]
        buckets = names.buckets_of(keys, salt)
        order = np.lexsort((keys, buckets))
        begins = np.searchsorted(buckets[order], np.arange(names.BUCKETS + 1))
        found = [name for name in COLUMNS if name in columns]
        head, header = make_header(
            {n: (_DTYPES.get(n, "F32"), columns[n].shape) for n in found},
            {"format": FORMAT, "version": VERSION},
        )
        contents = bytearray(head)
        for name in found:
            contents += np.ascontiguousarray(columns[name][order]).view(np.uint8).data
        doing = f"cannot write rows for servers to {self._folder}"
        with reported(doing, _WRITABLE), memoryview(contents) as view:
            self._files.make_directory(self._folder)
            self._take_away()
            # A host that has read the one before may still have its pages.
            self._made += 1
            name = names.staged_file(self._made)
            file = self._files.create(self._folder / name)
            try:
                self._files.write(file, view)
            finally:
                self._files.close(file)
            crcs = tuple(
                _core.crc32c(view[at : at + CHUNK_BYTES])
                for at in range(0, len(view), CHUNK_BYTES)
            )
        places = (header.tensors.get(name) for name in COLUMNS)
        offsets = [0 if place is None else place.begin for place in places]
        at, weight, state, count, seen, average = offsets
        run = LoadRun(
            name,
            len(contents),
            0,
            len(keys),
            (at, weight, state, count, seen, average),
            crcs,
        )
        return Staged(run, begins)

    def _take_away(self) -> None:
        if self._made:
            self._files.unlink(self._folder / names.staged_file(self._made))

    def __enter__(self) -> Stage:
        """Takes what was put away at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves nothing behind; what cannot be removed goes at the next ``resume``."""
        with contextlib.suppress(OSError):
            self._take_away()
        with contextlib.suppress(SnapshotError):
            for name in [*self.inside.names(), *self.inside.uncommitted()]:
                self.inside.remove(name)
        if self.name in self._files.list(self.directory.path):
            with contextlib.suppress(OSError):
                self._files.remove_directory(self._folder)
