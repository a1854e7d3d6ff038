# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A table over a chain of exports, for lookups: layers of files, the newest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torch_cpudist import _core
from torch_cpudist.exports import names
from torch_cpudist.exports.encoding import DTYPES
from torch_cpudist.exports.manifest import File, Table
from torch_cpudist.exports.pieces import by_bucket, packed
from torch_cpudist.exports.reading import SCALE, Export
from torch_cpudist.exports.rows_file import RowsFile
from torch_cpudist.snapshot.checksums import chunk_checksums
from torch_cpudist.snapshot.entries import CHUNK_BYTES
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.mapped import Mapped
from torch_cpudist.snapshot.merging import Layer, merged
from torch_cpudist.snapshot.names import BUCKETS
from torch_cpudist.snapshot.tensors import ITEM_BYTES

#: A lookup goes through at most so many deltas; more of them become one, in memory.
MOST_DELTAS = 8


@dataclass(frozen=True)
class TableLayers:
    """What a chain has of one table. Immutable.

    Attributes:
        table: it.
        dtype: of its rows.
        base: the files of the whole export.
        deltas: those of each delta, the oldest first.
    """

    table: Table
    dtype: str
    base: tuple[RowsFile, ...]
    deltas: tuple[tuple[RowsFile, ...], ...] = ()

    def with_delta(self, files: Sequence[RowsFile]) -> TableLayers:
        """With one delta more, whose bytes were checked.

        Cost: where there are ``MOST_DELTAS`` already, they are merged in memory first:
        all rows that they have.
        """
        deltas = self.deltas
        if len(deltas) >= MOST_DELTAS:
            deltas = (_joined(self.table, self.dtype, deltas),)
        return TableLayers(self.table, self.dtype, self.base, (*deltas, tuple(files)))

    def native(self) -> _core.ExportedTable:
        """For lookups."""
        newest_first = [*reversed(self.deltas), self.base]
        layers = [[file.native() for file in layer] for layer in newest_first]
        return _core.ExportedTable(spec_of(self.table), layers)


def spec_of(table: Table) -> _core.TableSpec:
    """A table as the core makes its initial rows."""
    return _core.TableSpec(
        table.name,
        table.rows,
        table.dim,
        remote=True,
        seed=table.seed,
        initial=table.initial,
        overrides=table.overrides,
        open=table.open,
    )


def layers_of(exports: Sequence[Export], name: str) -> TableLayers:
    """A table over a chain, the whole export first.

    Raises:
        SnapshotCorruptError: a header is not as it was written. Rows themselves are
            checked when they are looked up.
    """
    manifest = exports[0].manifest
    index = manifest.table_index(name)
    if index is None:
        raise KeyError(name)
    table = manifest.tables[index]
    base, *deltas = (tuple(one.rows_files(index)) for one in exports)
    found = TableLayers(table, manifest.dtype, base)
    for delta in deltas:
        found = found.with_delta(delta)
    return found


def whole(export: Export, name: str) -> _core.ExportedTable:
    """A table all of whose rows are in the model's file, for lookups where they lie.

    Raises:
        SnapshotCorruptError: the file's header is not as it was written.
    """
    mapped = export.model
    stored = mapped.header().tensors
    weight = stored[name]
    rows, dim = weight.shape
    data = _core.ExportedBytes(
        mapped.memory, list(mapped.crc32c), CHUNK_BYTES, names.MODEL
    )
    kinds = {kind: dtype for dtype, kind in DTYPES.items()}
    scale = stored.get(name + SCALE)
    file = _core.ExportedRows(
        data,
        rows=rows,
        buckets=(0, 0),
        dtype=kinds[weight.dtype],
        dim=dim,
        weight=weight.begin,
        scale=0 if scale is None else scale.begin,
    )
    spec = _core.TableSpec(name, rows, dim, remote=True)
    return _core.ExportedTable(spec, [[file]])


def has_rows(export: Export, name: str) -> bool:
    """Whether a tensor of the model's file is rows that ``whole`` can look up."""
    stored = export.model.header().tensors.get(name)
    if stored is None or len(stored.shape) != 2 or not all(stored.shape):
        return False
    known = stored.dtype in DTYPES.values()
    scaled = name + SCALE in export.model.header().tensors
    aligned = stored.begin % ITEM_BYTES[stored.dtype] == 0
    return known and aligned and scaled == (stored.dtype == DTYPES["int8"])


class _InMemory(Files):
    """A file system of files that are not on a disk."""

    def __init__(self, contents: bytes) -> None:
        self._contents = contents

    def size(self, path: Path) -> int | None:
        """Of the only one."""
        return len(self._contents)

    def map(self, path: Path) -> memoryview:
        """The only one."""
        return memoryview(self._contents)


def _joined(
    table: Table, dtype: str, deltas: Sequence[Sequence[RowsFile]]
) -> tuple[RowsFile, ...]:
    """Several deltas as one, in memory."""
    layers = []
    for files in deltas:
        gone = [file.column("keys") for file in files if file.gone]
        keys = np.concatenate([np.empty(0, np.int64), *gone])
        layers.append(Layer([file for file in files if not file.gone], keys))
    columns = ("weight", "scale") if dtype == "int8" else ("weight",)
    span = (0, BUCKETS)
    (run,) = merged(layers, table.salt, columns, table=table.name, buckets=span)
    went = np.unique(np.concatenate([layer.gone for layer in layers]))
    left, left_buckets = by_bucket(np.setdiff1d(went, run.keys), table.salt)
    found = []
    for name, keys, buckets, values in (
        (names.rows_name(0, 0), run.keys, run.buckets, run.columns),
        (names.gone_name(0), left, left_buckets, {}),
    ):
        if not len(keys):
            continue
        file = File(name, 0, 0, len(keys), span, ())
        pieces = packed(file, table, dtype, {"keys": keys, **values}, buckets)
        checksums, size = chunk_checksums(pieces)
        contents = b"".join(pieces)
        file = File(name, size, 0, file.rows, span, checksums)
        mapped = Mapped(
            _InMemory(contents),
            Path("memory") / name,
            size,
            checksums,
            CHUNK_BYTES,
            table.name,
            kind="export",
        )
        found.append(RowsFile(file, table, dtype, mapped))
    return tuple(found)
