# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A file of rows: columns of the same length, rows by bucket and key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.entries import File, Table
from torch_cpudist.snapshot.mapped import Mapped
from torch_cpudist.snapshot.tensors import NUMPY, Stored

FORMAT = "torch_cpudist.rows"
VERSION = "1"
#: In the order of ``LoadRun.offsets``.
COLUMNS = ("keys", "weight", "state", "count", "last_seen", "average")
_BUCKET_BEGIN = "bucket_begin"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LoadRun:
    """Rows of one file that one server is to load.

    Attributes:
        file: its name.
        file_bytes: its size.
        row_begin: the first row.
        row_end: the row after the last one.
        offsets: where row 0 of keys, weight, state, count, last_seen and average is,
            from the beginning of the file; 0: the file has none.
        crc32c: of every 256 KiB of the file.
        snapshot: whose file it is.
    """

    file: str
    file_bytes: int
    row_begin: int
    row_end: int
    offsets: tuple[int, int, int, int, int, int]
    crc32c: tuple[int, ...]
    snapshot: str = ""


def expected_columns(
    table: Table, rows: int, average: bool
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor that a file of rows has.

    Args:
        table: whose rows.
        rows: how many.
        average: whether the servers keep a moving average.
    """
    columns: dict[str, tuple[str, tuple[int, ...]]] = {
        "keys": ("I64", (rows,)),
        "weight": ("F32", (rows, table.dim)),
        "count": ("U32", (rows,)),
        "last_seen": ("U32", (rows,)),
        _BUCKET_BEGIN: ("I32", (names.BUCKETS + 1,)),
    }
    if table.state_elements:
        columns["state"] = ("F32", (rows, table.state_elements))
    if average:
        columns["average"] = ("F32", (rows, table.dim))
    return columns


class Part:
    """One file of rows of a table, opened.

    Columns are views of the file, which is read, and checked, where they are looked
    at. Thread safety: any number of threads.

    Args:
        file: what the manifest says of it.
        table: whose rows it has.
        mapped: its contents.
        average: whether it has to have a moving average.

    Raises:
        SnapshotCorruptError: its tensors are not those of such rows.
    """

    def __init__(self, file: File, table: Table, mapped: Mapped, average: bool) -> None:
        self.file = file
        self.table = table
        self._mapped = mapped
        header = mapped.header()
        known = (header.metadata.get("format"), header.metadata.get("version"))
        if known != (FORMAT, VERSION):
            raise mapped.damaged(f"expected {FORMAT} version {VERSION}, found {known}")
        expected = expected_columns(table, file.rows, average)
        found = {name: (t.dtype, t.shape) for name, t in header.tensors.items()}
        if found != expected:
            raise mapped.damaged(f"expected the tensors {expected}, found {found}")
        self._tensors = header.tensors

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.file.rows

    @property
    def columns(self) -> list[str]:
        """The names of its columns, in a fixed order."""
        return [name for name in COLUMNS if name in self._tensors]

    def column(self, name: str, begin: int = 0, end: int | None = None) -> Array:
        """Rows of a column, read-only.

        Args:
            name: one of ``columns``.
            begin: the first row.
            end: the row after the last one; ``None``: to the end.

        Raises:
            SnapshotCorruptError: a chunk that they touch is not as it was written.
        """
        stored = self._tensors[name]
        return view(
            self._mapped, stored, begin, stored.shape[0] if end is None else end
        )

    def bucket_begin(self) -> Array:
        """The first row of each bucket, and the number of rows behind the last one.

        Raises:
            SnapshotCorruptError: it is none such.
        """
        begins = view(self._mapped, self._tensors[_BUCKET_BEGIN], 0, names.BUCKETS + 1)
        rising = bool((begins[:-1] <= begins[1:]).all())
        if begins[0] != 0 or begins[-1] != self.rows or not rising:
            raise self._mapped.damaged("its buckets do not divide its rows")
        return begins

    def load_runs(
        self, buckets: tuple[int, int], without: npt.NDArray[np.int64]
    ) -> list[LoadRun]:
        """Where the rows of a run of buckets are, but for those of some keys.

        Args:
            buckets: the first one, and the one after the last.
            without: keys whose rows are left out.
        """
        whole = self.load_run(buckets)
        left_out = np.sort(self.find(without))
        first, last = whole.row_begin, whole.row_end
        here = left_out[(first <= left_out) & (left_out < last)].tolist()
        begins, ends = [first, *(row + 1 for row in here)], [*here, last]
        return [
            replace(whole, row_begin=begin, row_end=end)
            for begin, end in zip(begins, ends, strict=True)
            if begin < end
        ]

    def load_run(self, buckets: tuple[int, int]) -> LoadRun:
        """Where the rows of a run of buckets are; it may have none."""
        begins = self.bucket_begin()
        offsets = tuple(
            self._tensors[name].begin if name in self._tensors else 0
            for name in COLUMNS
        )
        keys, weight, state, count, last_seen, average = offsets
        return LoadRun(
            self.file.name,
            self.file.bytes,
            int(begins[buckets[0]]),
            int(begins[buckets[1]]),
            (keys, weight, state, count, last_seen, average),
            self.file.crc32c,
            self._mapped.path.parent.name,
        )

    def find(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The row of each key; -1 for those that are not here.

        Cost: a few pages of the file for each key.
        """
        found = np.full(len(keys), -1, dtype=np.int64)
        begins = self.bucket_begin()
        buckets = names.buckets_of(keys, self.table.salt).astype(np.int64)
        for i, (key, bucket) in enumerate(zip(keys, buckets, strict=True)):
            first, last = int(begins[bucket]), int(begins[bucket + 1])
            run = self.column("keys", first, last)
            at = int(np.searchsorted(run, key))
            if at < len(run) and run[at] == key:
                found[i] = first + at
        return found

    def check(self, servers: int) -> None:
        """Checks every byte, and that every row is where it belongs.

        Args:
            servers: how many there were.

        Raises:
            SnapshotCorruptError: something is not as it was written.
        """
        self._mapped.check_all()
        part = names.part_name(self.file.name)
        begins = self.bucket_begin()
        first, last = names.server_buckets(part.server if part else 0, servers)
        if begins[first] != 0 or begins[last] != self.rows:
            raise self._mapped.damaged("it has rows of buckets of another server")
        for begin, end in _runs(self.rows):
            keys = self.column("keys", begin, end)
            if problem := self.table.keys_outside(keys):
                raise self._mapped.damaged(problem)
            buckets = names.buckets_of(keys, self.table.salt).astype(np.int64)
            places = np.arange(begin, end)
            own = (begins[buckets] <= places) & (places < begins[buckets + 1])
            rising = (keys[:-1] < keys[1:]) | (buckets[:-1] < buckets[1:])
            if not own.all() or not rising.all():
                raise self._mapped.damaged("its rows are not by bucket and key")


def _runs(rows: int, length: int = 1 << 20) -> Iterator[tuple[int, int]]:
    """Runs of rows that overlap by one, so that neighbours are compared."""
    for begin in range(0, rows, length):
        yield max(begin - 1, 0), min(begin + length, rows)


def view(mapped: Mapped, stored: Stored, begin: int, end: int) -> Array:
    """Rows of a tensor of a file, read-only; their chunks are checked."""
    dtype = NUMPY[stored.dtype]
    rows = stored.shape[0] if stored.shape else 1
    width = (stored.end - stored.begin) // rows if rows else 0
    contents = mapped.view(stored.begin + begin * width, stored.begin + end * width)
    shape = (end - begin, *stored.shape[1:])
    return np.frombuffer(contents, dtype=dtype).reshape(shape)
