# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A file of rows of an export: columns of the same length, by bucket and key."""

from __future__ import annotations

import numpy as np

from torch_cpudist import _core
from torch_cpudist.exports import names
from torch_cpudist.exports.encoding import DTYPES, NUMPY
from torch_cpudist.exports.manifest import File, Table
from torch_cpudist.snapshot.entries import CHUNK_BYTES
from torch_cpudist.snapshot.mapped import Mapped
from torch_cpudist.snapshot.names import BUCKETS, buckets_of
from torch_cpudist.snapshot.parts import Array
from torch_cpudist.snapshot.tensors import NUMPY as STORED

FORMAT = "torch_cpudist.export.rows"
GONE = "torch_cpudist.export.gone"
VERSION = "1"
_ROWS_AT_ONCE = 1 << 20


def expected_columns(
    table: Table, file: File, dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a file, in the order of the file.

    Those of large elements come first, so that all are aligned.
    """
    first, last = file.buckets
    columns: dict[str, tuple[str, tuple[int, ...]]] = {
        "keys": ("I64", (file.rows,)),
        "bucket_begin": ("I32", (last - first + 1,)),
    }
    if not names.is_gone(file.name):
        if dtype == "int8":
            columns["scale"] = ("F32", (file.rows,))
        columns["weight"] = (DTYPES[dtype], (file.rows, table.dim))
    return columns


class RowsFile:
    """One file of rows, or of keys that are gone, opened.

    A source of ``snapshot.merging``. Thread safety: any number of threads.

    Args:
        file: what the manifest says of it.
        table: whose rows it has.
        dtype: of its rows.
        mapped: its contents.

    Raises:
        SnapshotCorruptError: its tensors are not those of such rows.
    """

    def __init__(self, file: File, table: Table, dtype: str, mapped: Mapped) -> None:
        self.file = file
        self.table = table
        self._dtype = dtype
        self._mapped = mapped
        header = mapped.header()
        wanted = GONE if names.is_gone(file.name) else FORMAT
        known = (header.metadata.get("format"), header.metadata.get("version"))
        if known != (wanted, VERSION):
            raise mapped.damaged(f"expected {wanted} version {VERSION}, found {known}")
        expected = expected_columns(table, file, dtype)
        found = {name: (t.dtype, t.shape) for name, t in header.tensors.items()}
        if found != expected:
            raise mapped.damaged(f"expected the tensors {expected}, found {found}")
        self._tensors = header.tensors
        self._begins: Array | None = None
        self._native: _core.ExportedRows | None = None

    @property
    def rows(self) -> int:
        """How many rows, or gone keys, it has."""
        return self.file.rows

    @property
    def gone(self) -> bool:
        """Whether its keys are gone."""
        return names.is_gone(self.file.name)

    def column(self, name: str, begin: int = 0, end: int | None = None) -> Array:
        """Rows of ``keys``, ``weight`` or ``scale``, read-only.

        bfloat16 comes as its bits.

        Raises:
            SnapshotCorruptError: a chunk that they touch is not as it was written.
        """
        stored = self._tensors[name]
        last = stored.shape[0] if end is None else end
        width = (stored.end - stored.begin) // stored.shape[0] if stored.shape[0] else 0
        contents = self._mapped.view(
            stored.begin + begin * width, stored.begin + last * width
        )
        dtype = NUMPY[self._dtype] if name == "weight" else STORED[stored.dtype]
        shape = (last - begin, *stored.shape[1:])
        return np.frombuffer(contents, dtype=dtype).reshape(shape)

    def bucket_begin(self) -> Array:
        """The first row of each of all buckets, and the number of rows behind the last.

        Raises:
            SnapshotCorruptError: its buckets do not divide its rows.
        """
        if self._begins is None:
            own = self.column("bucket_begin")
            rising = bool((own[:-1] <= own[1:]).all())
            if own[0] != 0 or own[-1] != self.rows or not rising:
                raise self._mapped.damaged("its buckets do not divide its rows")
            first, last = self.file.buckets
            begins = np.zeros(BUCKETS + 1, np.int64)
            begins[first : last + 1] = own
            begins[last + 1 :] = self.rows
            self._begins = begins
        return self._begins

    def check(self) -> None:
        """Checks every byte, and that every row is where it belongs.

        Raises:
            SnapshotCorruptError: something is not as it was written.
        """
        self._mapped.check_all()
        begins = self.bucket_begin()
        for begin in range(0, self.rows, _ROWS_AT_ONCE):
            # Runs overlap by one, so that neighbours are compared.
            first, last = max(begin - 1, 0), min(begin + _ROWS_AT_ONCE, self.rows)
            keys = self.column("keys", first, last)
            outside = int(keys.min()) < 0 or int(keys.max()) >= self.table.rows
            if outside and not self.table.open:
                raise self._mapped.damaged(
                    f"it has keys outside of 0 to {self.table.rows - 1}"
                )
            buckets = buckets_of(keys, self.table.salt).astype(np.int64)
            places = np.arange(first, last)
            own = (begins[buckets] <= places) & (places < begins[buckets + 1])
            rising = (keys[:-1] < keys[1:]) | (buckets[:-1] < buckets[1:])
            if not own.all() or not rising.all():
                raise self._mapped.damaged("its rows are not by bucket and key")

    def native(self) -> _core.ExportedRows:
        """The same file for lookups, which check what they read by themselves.

        Always the same one: what was checked need not be checked again after a delta.
        """
        if self._native is None:
            self._native = self._made_native()
        return self._native

    def _made_native(self) -> _core.ExportedRows:
        mapped = self._mapped
        data = _core.ExportedBytes(
            mapped.memory, list(mapped.crc32c), CHUNK_BYTES, self.file.name
        )
        begins = {name: one.begin for name, one in self._tensors.items()}
        return _core.ExportedRows(
            data,
            rows=self.rows,
            buckets=self.file.buckets,
            dtype=self._dtype,
            dim=self.table.dim,
            **begins,
        )
