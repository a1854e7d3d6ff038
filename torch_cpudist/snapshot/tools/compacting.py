# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Puts a chain of snapshots together to one that has all rows.

It is of the same moment as the newest of them, and has its place in the order of
commits. Nothing of the chain is changed. Memory is bounded, whatever its size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from torch_cpudist.errors import SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.checksums import chunk_checksums
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.entries import File, Table
from torch_cpudist.snapshot.files import reported, write_durably
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.merging import merged
from torch_cpudist.snapshot.parts import COLUMNS, FORMAT, VERSION, Array
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.tensors import make_header

#: Of rows in one file.
PART_BYTES = 32 << 20
_COPY_BYTES = 4 << 20
_REMEDY = (
    "See that the directory can be written and has space for one more snapshot; what "
    "there was is as before."
)
_DTYPES = {"keys": "I64", "count": "U32", "last_seen": "U32", "bucket_begin": "I32"}


def compacted_name(manifest: Manifest) -> str:
    """What the snapshot of all rows is called."""
    return manifest.name + names.COMPACTED


def compact(directory: Directory, name: str, part_bytes: int = PART_BYTES) -> Manifest:
    """Writes and commits the snapshot that a chain is.

    While no run saves into the directory. What an earlier attempt has left behind goes.

    Args:
        directory: of both.
        name: the newest member of the chain.
        part_bytes: of rows in one file, about; in memory a few times as much.

    Returns:
        The new manifest.

    Raises:
        SnapshotError: it has all rows already, was compacted already, or the file
            system refuses. There is no new snapshot then.
        SnapshotCorruptError: a file of the chain is damaged; the same.

    Cost: reads the chain once and writes what it comes to.
    """
    snapshot = Snapshot(directory.folder(name), directory.files)
    source = snapshot.manifest
    if source.base is None:
        raise SnapshotError(f"snapshot {name} has all rows already")
    target = compacted_name(source)
    folder = directory.prepare(target)
    writer = _Writer(directory, snapshot, target)
    with reported(f"snapshot {target}: cannot write to {folder}", _REMEDY):
        for index in range(len(source.tables)):
            writer.write_table(index, part_bytes)
        writer.copy_others()
    made = dataclasses.replace(
        source, name=target, base=None, files=tuple(writer.written)
    )
    return directory.commit(made, source.commit)


class _Writer:
    """Writes the files of one snapshot that is put together."""

    def __init__(self, directory: Directory, snapshot: Snapshot, name: str) -> None:
        self._files = directory.files
        self._folder = directory.folder(name)
        self._snapshot = snapshot
        self._manifest = snapshot.manifest
        self.written: list[File] = []

    def write_table(self, index: int, part_bytes: int) -> None:
        """Writes the rows of a table, in parts of the servers that there were."""
        table = self._manifest.tables[index]
        rows_at_once = max(part_bytes // _row_bytes(table), 1)
        parts = [0] * self._manifest.servers
        for server, columns in self._runs(table, rows_at_once):
            for begin in range(0, len(columns["keys"]), rows_at_once):
                some = {n: c[begin : begin + rows_at_once] for n, c in columns.items()}
                name = names.PartName(server, index, parts[server])
                self._write_part(table, name, some)
                parts[server] += 1
        self._snapshot.forget()  # what was read of it need not stay mapped

    def _runs(
        self, table: Table, rows_at_once: int
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """Rows by bucket and key, some at a time, each time of one server."""
        wanted = ["weight", "count", "last_seen"]
        if table.state_elements:
            wanted.append("state")
        if self._manifest.average_decay:
            wanted.append("average")
        servers = self._manifest.servers
        layers = self._snapshot.layers(table.name)
        for run in merged(layers, table.salt, wanted, rows_at_once, table.name):
            for server in range(servers):
                first, last = names.server_buckets(server, servers)
                begin, end = np.searchsorted(run.buckets, [first, last])
                if begin < end:
                    columns = {n: c[begin:end] for n, c in run.columns.items()}
                    yield server, {"keys": run.keys[begin:end], **columns}

    def _write_part(
        self, table: Table, name: names.PartName, columns: Mapping[str, Array]
    ) -> None:
        buckets = names.buckets_of(columns["keys"], table.salt)
        begins = np.searchsorted(buckets, np.arange(names.BUCKETS + 1))
        found = {n: columns[n] for n in COLUMNS if n in columns}
        found["bucket_begin"] = begins.astype(np.int32)
        head, _ = make_header(
            {n: (_DTYPES.get(n, "F32"), c.shape) for n, c in found.items()},
            {"format": FORMAT, "version": VERSION},
        )
        pieces = [memoryview(head)]
        pieces += [_bytes_of(c) for c in found.values()]
        self._write(str(name), pieces, name.table, len(columns["keys"]))

    def _write(
        self, name: str, pieces: list[memoryview], table: int | None, rows: int
    ) -> None:
        write_durably(self._files, self._folder / name, pieces)
        checksums, size = chunk_checksums(pieces)
        self.written.append(File(name, size, table, rows, checksums))

    def copy_others(self) -> None:
        """Copies dense parameters and what trainers keep, all of it checked."""
        for file in self._manifest.files:
            if file.table is None and not file.gone:
                self._copy(file.name, self._snapshot.contents(file))
                self.written.append(file)
        for trainer in self._manifest.trainers:
            # Reading it checks both of its files.
            self._snapshot.trainer(trainer.rank)
            tensors = names.trainer_name(trainer.rank, "safetensors")
            for name in (trainer.file, tensors):
                self._copy(name, self._files.map(self._snapshot.folder / name))

    def _copy(self, name: str, contents: memoryview) -> None:
        pieces = (
            contents[begin : begin + _COPY_BYTES]
            for begin in range(0, len(contents), _COPY_BYTES)
        )
        write_durably(self._files, self._folder / name, pieces)


def _row_bytes(table: Table) -> int:
    return 16 + 4 * (2 * table.dim + table.state_elements)


def _bytes_of(column: Array) -> memoryview:
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8).data
