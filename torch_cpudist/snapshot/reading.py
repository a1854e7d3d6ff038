# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A snapshot opened: rows by key, dense parameters, states of trainers, load plans.

Every file is mapped, and nothing of it is used before its checksum was found right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.entries import CHUNK_BYTES, Block, Dense, File
from torch_cpudist.snapshot.files import Files, reported
from torch_cpudist.snapshot.mapped import Mapped
from torch_cpudist.snapshot.parts import Array, LoadRun, Part, view
from torch_cpudist.snapshot.tensors import NUMPY
from torch_cpudist.snapshot.trainer_files import read_trainer

_FILE_SYSTEM = Files()
DENSE_FORMAT = "torch_cpudist.dense"
DENSE_VERSION = "1"
# Whose keys are compared at a time: 8 MB of them.
_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Rows:
    """Rows of a table by key.

    Attributes:
        found: bool ``[keys]``: whether the snapshot has a row of the key.
        columns: ``[keys, …]`` by name, zero where there is none: ``weight``,
            ``count``, ``last_seen``, and ``state`` and ``average`` where they are kept.
    """

    found: npt.NDArray[np.bool_]
    columns: Mapping[str, Array]


class Snapshot:
    """A committed snapshot, for reading.

    Thread safety: any number of threads.

    Args:
        path: its directory.
        files: the file system.

    Raises:
        SnapshotError: there is no snapshot, or it is of a later format.
        SnapshotCorruptError: its manifest is damaged.
    """

    def __init__(
        self, path: str | os.PathLike[str], files: Files = _FILE_SYSTEM
    ) -> None:
        self.folder = Path(path).expanduser().absolute()
        self.files = files
        directory = Directory(self.folder.parent, files)
        self.manifest = directory.manifest(self.folder.name)
        self._opened: dict[str, Mapped] = {}

    def _open(self, file: File) -> Mapped:
        mapped = self._opened.get(file.name)
        if mapped is None:
            table = "" if file.table is None else self.manifest.tables[file.table].name
            with reported(
                f"snapshot {self.manifest.name}: cannot read {file.name}",
                "See that it can be read on this host.",
            ):
                mapped = Mapped(
                    self.files,
                    self.folder / file.name,
                    file.bytes,
                    file.crc32c,
                    CHUNK_BYTES,
                    table,
                )
            self._opened[file.name] = mapped
        return mapped

    def forget(self) -> None:
        """Lets go of all files; those that are used again are opened and checked anew.

        Arrays that were given out keep what they need.
        """
        self._opened.clear()

    # ---- rows ----------------------------------------------------------------------

    def parts(self, table: str) -> Iterator[Part]:
        """All files of rows of a table, which come in no order of keys.

        Raises:
            SnapshotError: there is no such table.
            SnapshotCorruptError: a file is not as it was written.
        """
        for file in self.manifest.table_files(self.manifest.table_index(table)):
            yield self._part(file)

    def _part(self, file: File) -> Part:
        table = self.manifest.tables[file.table or 0]
        average = self.manifest.average_decay > 0
        return Part(file, table, self._open(file), average)

    def rows(self, table: str, keys: npt.ArrayLike) -> Rows:
        """Looks rows up.

        Args:
            table: its name.
            keys: int64 ``[keys]``.

        Raises:
            SnapshotError: there is no such table.
            SnapshotCorruptError: a chunk that is needed is not as it was written.

        Cost: a few pages of each of the table's files for each key.
        """
        wanted = np.asarray(keys, dtype=np.int64).reshape(-1)
        found = np.zeros(len(wanted), dtype=np.bool_)
        columns: dict[str, Array] = {}
        for part in self.parts(table):
            places = part.find(wanted)
            here = places >= 0
            for name in part.columns[1:]:
                column = part.column(name, 0, 0)
                if name not in columns:
                    shape = (len(wanted), *column.shape[1:])
                    columns[name] = np.zeros(shape, dtype=column.dtype)
                for i in np.flatnonzero(here):
                    row = int(places[i])
                    columns[name][i] = part.column(name, row, row + 1)[0]
            found |= here
        return Rows(found, columns)

    def load_plan(self, table: str, server: int, servers: int) -> list[LoadRun]:
        """Which rows of which files one of several servers is to load.

        However many servers there were: owners follow from buckets alone.

        Args:
            table: its name.
            server: which one, from 0.
            servers: how many there are now.

        Raises:
            SnapshotError: there is no such table.
            SnapshotCorruptError: a header, or where its buckets begin, is damaged. The
                rows themselves are checked by who loads them.
        """
        buckets = names.server_buckets(server, servers)
        runs = [part.load_run(buckets) for part in self.parts(table)]
        return [run for run in runs if run.row_begin < run.row_end]

    # ---- dense parameters ----------------------------------------------------------

    def dense(self, name: str) -> Array:
        """The values of a dense parameter, in its shape.

        Raises:
            SnapshotError: there is none of that name.
            SnapshotCorruptError: a file is not as it was written.
        """
        dense = self.manifest.dense[self.manifest.dense_index(name)]
        return self._assemble(dense, "weight")

    def dense_average(self, name: str) -> Array:
        """The moving average of a dense parameter, in its shape. Errors as ``dense``.

        Raises:
            SnapshotError: none was kept.
        """
        if not self.manifest.average_decay:
            raise SnapshotError(
                f"snapshot {self.manifest.name}: saved without average=cpudist.EMA"
            )
        dense = self.manifest.dense[self.manifest.dense_index(name)]
        return self._assemble(dense, "average")

    def dense_state(self, name: str) -> dict[str, Array]:
        """The optimizer state of a dense parameter, by torch's names, in its shapes.

        Parts with one value per row are ``[rows]``. Errors as ``dense``.
        """
        dense = self.manifest.dense[self.manifest.dense_index(name)]
        dtype = NUMPY[dense.dtype]
        rows = dense.elements // dense.row_width
        # Memory is taken when it is known that the files have so much.
        blocks = dense.blocks if dense.state else ()
        states = [self.block_state(dense, block) for block in blocks]
        flat = {
            part.name: np.empty(rows if part.per_row else dense.elements, dtype)
            for part in dense.state
        }
        for block, raw in zip(blocks, states, strict=True):
            at = 0
            for part in dense.state:
                unit = dense.row_width if part.per_row else 1
                first, size = block.offset // unit, block.elements // unit
                flat[part.name][first : first + size] = raw[at : at + size]
                at += size
        return {
            part.name: flat[part.name].reshape(-1 if part.per_row else dense.shape)
            for part in dense.state
        }

    def block_state(self, dense: Dense, block: Block) -> Array:
        """The state of one block as its server held it: parts one after the other."""
        size = sum(
            block.elements // (dense.row_width if part.per_row else 1)
            for part in dense.state
        )
        return self._block(dense, block, "state", size)

    def block_weight(self, dense: Dense, block: Block) -> Array:
        """The values of one block, read-only."""
        return self._block(dense, block, "weight", block.elements)

    def block_average(self, dense: Dense, block: Block) -> Array:
        """The moving average of one block, where one is kept; read-only."""
        return self._block(dense, block, "average", block.elements)

    def _assemble(self, dense: Dense, what: str) -> Array:
        # Memory is taken when it is known that the files have so much.
        pieces = [np.empty(0, NUMPY[dense.dtype])]
        for block in dense.blocks:
            pieces.append(self._block(dense, block, what, block.elements))
        return np.concatenate(pieces).reshape(dense.shape)

    def _block(self, dense: Dense, block: Block, what: str, size: int) -> Array:
        mapped = self._open_dense(
            self.manifest.file(str(names.PartName(block.server, None)))
        )
        name = f"{block.name}.{what}"
        stored = mapped.header().tensors.get(name)
        if stored is None:
            raise mapped.damaged(f"it has no tensor {name!r}")
        if (stored.dtype, stored.shape) != (dense.dtype, (size,)):
            raise mapped.damaged(
                f"expected {dense.dtype} [{size}] of {name!r}, found {stored.dtype} "
                f"{list(stored.shape)}"
            )
        return view(mapped, stored, 0, size)

    def _open_dense(self, file: File) -> Mapped:
        mapped = self._open(file)
        metadata = mapped.header().metadata
        known = (metadata.get("format"), metadata.get("version"))
        if known != (DENSE_FORMAT, DENSE_VERSION):
            raise mapped.damaged(
                f"expected {DENSE_FORMAT} version {DENSE_VERSION}, found {known}"
            )
        return mapped

    # ---- trainers ------------------------------------------------------------------

    def trainer(self, rank: int) -> Any:
        """The state tree of a trainer's own; ``None`` if it took no part.

        Raises:
            SnapshotCorruptError: one of its two files is not as it was written.
        """
        for trainer in self.manifest.trainers:
            if trainer.rank == rank:
                return read_trainer(self.folder, trainer, self.files)
        return None

    # ---- all of it -----------------------------------------------------------------

    def verify(self, tables: Container[str] | None = None) -> list[SnapshotError]:
        """Reads and checks every byte, and that rows are where they belong.

        Args:
            tables: names of those whose rows are checked; ``None``: of all. The rest of
                the snapshot is checked in any case.

        Returns:
            What is wrong, a file each; empty if nothing is.
        """
        found: list[SnapshotError] = []
        known = self.manifest.tables
        chosen = [tables is None or table.name in tables for table in known]
        for file in self.manifest.files:
            with _gathering(found):
                if file.table is None:
                    self._check_dense(file)
                elif chosen[file.table]:
                    self._part(file).check(self.manifest.servers)
        for trainer in self.manifest.trainers:
            with _gathering(found):
                read_trainer(self.folder, trainer, self.files)
        if not found:
            for table, wanted in zip(known, chosen, strict=True):
                with _gathering(found):
                    if wanted:
                        self._check_distinct(table.name)
        return found

    def _check_dense(self, file: File) -> None:
        """Checks a file of dense blocks: those it has to have, and no others."""
        mapped = self._open_dense(file)
        mapped.check_all()
        expected = set()
        for dense in self.manifest.dense:
            for block in dense.blocks:
                if str(names.PartName(block.server, None)) != file.name:
                    continue
                self.block_weight(dense, block)
                expected.add(f"{block.name}.weight")
                if dense.state:
                    self.block_state(dense, block)
                    expected.add(f"{block.name}.state")
                if self.manifest.average_decay:
                    self.block_average(dense, block)
                    expected.add(f"{block.name}.average")
        others = sorted(set(mapped.header().tensors) - expected)
        if others:
            raise mapped.damaged(f"it has tensors of no block: {others}")

    def _check_distinct(self, table: str) -> None:
        """Checks that no key is in two files of a table, a run of buckets at a time."""
        parts = list(self.parts(table))
        begins = [part.bucket_begin() for part in parts]
        times = sum(part.rows for part in parts) // _ROWS_AT_ONCE + 1
        step = -(-names.BUCKETS // times)
        for first in range(0, names.BUCKETS, step):
            last = min(first + step, names.BUCKETS)
            keys = [
                part.column("keys", int(begin[first]), int(begin[last]))
                for part, begin in zip(parts, begins, strict=True)
            ]
            joined = np.concatenate(keys) if keys else np.empty(0, np.int64)
            unique, counts = np.unique(joined, return_counts=True)
            if len(unique) != len(joined):
                raise SnapshotCorruptError(
                    f"snapshot {self.manifest.name}: table {table!r} has more than one "
                    f"row of key {unique[counts > 1][0]}. Take another snapshot.",
                    table=table,
                )


@contextlib.contextmanager
def _gathering(found: list[SnapshotError]) -> Iterator[None]:
    try:
        yield
    except SnapshotError as error:
        found.append(error)
