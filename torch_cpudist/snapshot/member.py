# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The files of one snapshot, opened: without those of the snapshots it is put over.

Every file is mapped, and nothing of it is used before its checksum was found right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.entries import CHUNK_BYTES, Block, Dense, File
from torch_cpudist.snapshot.files import Files, reported
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.mapped import Mapped
from torch_cpudist.snapshot.parts import Array, Part, view
from torch_cpudist.snapshot.tensors import NUMPY
from torch_cpudist.snapshot.trainer_files import read_trainer

DENSE_FORMAT = "torch_cpudist.dense"
DENSE_VERSION = "1"
GONE_FORMAT = "torch_cpudist.gone"
GONE_VERSION = "1"
# Whose keys are compared at a time: 8 MB of them.
_ROWS_AT_ONCE = 1 << 20


class Member:
    """One member of a chain. Thread safety: any number of threads.

    Args:
        folder: its directory.
        manifest: its own.
        files: the file system.
    """

    def __init__(self, folder: Path, manifest: Manifest, files: Files) -> None:
        self.folder = folder
        self.manifest = manifest
        self.files = files
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

    def contents(self, file: File) -> memoryview:
        """All bytes of a file of a server.

        Raises:
            SnapshotCorruptError: it is not as it was written.
        """
        return self._open(file).view(0, file.bytes)

    def forget(self) -> None:
        """Lets go of all files; those that are used again are opened and checked anew.

        Arrays that were given out keep what they need.
        """
        self._opened.clear()

    # ---- rows ----------------------------------------------------------------------

    def parts(self, table: str) -> Iterator[Part]:
        """Its own files of rows of a table, which come in no order of keys.

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

    def gone(self, table: str) -> npt.NDArray[np.int64]:
        """Keys of a table that have no row any more since its base; in any order.

        Raises:
            SnapshotError: there is no such table.
            SnapshotCorruptError: a file is not as it was written.
        """
        index = self.manifest.table_index(table)
        found = [np.empty(0, np.int64)]
        for file in self.manifest.files:
            if file.gone:
                keys = self._gone_in(file).get(index)
                if keys is not None:
                    found.append(keys)
        return np.concatenate(found)

    def _gone_in(self, file: File) -> dict[int, npt.NDArray[np.int64]]:
        """The keys of a file of those that have gone, by table."""
        mapped = self._open(file)
        header = mapped.header()
        known = (header.metadata.get("format"), header.metadata.get("version"))
        if known != (GONE_FORMAT, GONE_VERSION):
            raise mapped.damaged(
                f"expected {GONE_FORMAT} version {GONE_VERSION}, found {known}"
            )
        found: dict[int, npt.NDArray[np.int64]] = {}
        by_name = {names.gone_keys(i): i for i in range(len(self.manifest.tables))}
        for name, stored in header.tensors.items():
            index = by_name.get(name)
            if index is None or stored.dtype != "I64" or len(stored.shape) != 1:
                raise mapped.damaged(f"{name!r} are no keys of a table")
            keys = view(mapped, stored, 0, stored.shape[0])
            if len(keys) > 1 and not (keys[:-1] < keys[1:]).all():
                raise mapped.damaged(f"{name!r} are not in the order of keys")
            found[index] = keys
        if sum(map(len, found.values())) != file.rows:
            raise mapped.damaged(f"expected {file.rows} keys, found others")
        return found

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

    def verify_own(self, tables: Container[str] | None = None) -> list[SnapshotError]:
        """Reads and checks every byte, and that rows are where they belong.

        Args:
            tables: names of those whose rows are checked; ``None``: of all.

        Returns:
            What is wrong, a file each; empty if nothing is.
        """
        found: list[SnapshotError] = []
        known = self.manifest.tables
        chosen = [tables is None or table.name in tables for table in known]
        for file in self.manifest.files:
            with _gathering(found):
                if file.gone:
                    self._check_gone(file)
                elif file.table is None:
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

    def _check_gone(self, file: File) -> None:
        """Checks that keys that have gone were this server's."""
        mapped = self._open(file)
        mapped.check_all()
        part = names.part_name(file.name)
        server = part.server if part else 0
        first, last = names.server_buckets(server, self.manifest.servers)
        for index, keys in self._gone_in(file).items():
            table = self.manifest.tables[index]
            if problem := table.keys_outside(keys):
                raise mapped.damaged(problem)
            buckets = names.buckets_of(keys, table.salt)
            if not ((first <= buckets) & (buckets < last)).all():
                raise mapped.damaged("it has keys of another server")

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
        gone = self.gone(table)
        begins = [part.bucket_begin() for part in parts]
        times = sum(part.rows for part in parts) // _ROWS_AT_ONCE + 1
        step = -(-names.BUCKETS // times)
        for first in range(0, names.BUCKETS, step):
            last = min(first + step, names.BUCKETS)
            keys = [
                part.column("keys", int(begin[first]), int(begin[last]))
                for part, begin in zip(parts, begins, strict=True)
            ]
            joined = np.concatenate([np.empty(0, np.int64), *keys])
            unique, counts = np.unique(joined, return_counts=True)
            if len(unique) != len(joined):
                raise SnapshotCorruptError(
                    f"snapshot {self.manifest.name}: table {table!r} has more than one "
                    f"row of key {unique[counts > 1][0]}. Take another snapshot.",
                    table=table,
                )
            both = joined[np.isin(joined, gone)]
            if len(both):
                raise SnapshotCorruptError(
                    f"snapshot {self.manifest.name}: table {table!r} has a row of key "
                    f"{both[0]}, which has gone. Take another snapshot.",
                    table=table,
                )


@contextlib.contextmanager
def _gathering(found: list[SnapshotError]) -> Iterator[None]:
    try:
        yield
    except SnapshotError as error:
        found.append(error)
