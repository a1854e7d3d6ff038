# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of one table over a chain of files: the newest of each key, gone keys left out.

A chain is a list of layers, the oldest first: all rows there were, then what changed
since. A run of buckets is merged at a time, so that memory does not grow with the
table; what comes out is in the order of files, by bucket and key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torch_cpudist.errors import SnapshotCorruptError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.parts import Array

#: Rows of all layers that are in memory at a time, if no bucket has more.
ROWS_AT_ONCE = 1 << 18

Keys = npt.NDArray[np.int64]


class Source(Protocol):
    """A file of rows by bucket and key; ``parts.Part`` is one."""

    @property
    def rows(self) -> int:
        """How many rows it has."""

    def bucket_begin(self) -> Array:
        """The first row of each bucket, and the number of rows behind the last one."""

    def column(self, name: str, begin: int = 0, end: int | None = None) -> Array:
        """Rows of a column, read-only."""


@dataclass(frozen=True)
class Layer:
    """What one member of a chain says of a table.

    Attributes:
        sources: its files of rows; a key is in at most one of them.
        gone: keys without a row any more, if they are not in ``sources``; int64, in
            any order.
    """

    sources: Sequence[Source]
    gone: Keys = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class Run:
    """Rows of a run of buckets.

    Attributes:
        first: the first bucket.
        last: the bucket after the last one.
        keys: int64 ``[rows]``, by bucket and key, none twice.
        buckets: of each row, uint64 ``[rows]``.
        layers: which layer each row is of, int64 ``[rows]``.
        columns: by name, ``[rows, …]``; none where no layer has a file.
    """

    first: int
    last: int
    keys: Keys
    buckets: npt.NDArray[np.uint64]
    layers: npt.NDArray[np.int64]
    columns: Mapping[str, Array]


@dataclass(frozen=True)
class _Piece:
    """Keys of a run that one source, or the gone ones of a layer, have."""

    keys: Keys
    layer: int
    source: Source | None
    begin: int = 0
    end: int = 0


def merged(
    layers: Sequence[Layer],
    salt: int,
    columns: Sequence[str] = ("weight",),
    rows_at_once: int = ROWS_AT_ONCE,
    table: str = "",
    buckets: tuple[int, int] | None = None,
) -> Iterator[Run]:
    """Goes through the rows of a table by bucket and key.

    Args:
        layers: the oldest first.
        salt: the table's.
        columns: wanted beside the keys; every source has to have them.
        rows_at_once: about how many rows of all layers are in memory at a time.
        table: its name, for messages.
        buckets: the first one and the one after the last one, as one run; ``None``:
            all 4096, in as many runs as there need be.

    Yields:
        Runs of buckets, in their order.

    Raises:
        SnapshotCorruptError: a file is not as it was written, or two files of a layer
            have rows of one key.

    Cost: reads everything once; some 300 ns for each row of all layers.
    """
    gone = [_by_bucket(layer.gone, salt) for layer in layers]
    files = [[(one, one.bucket_begin()) for one in la.sources] for la in layers]
    total = sum(source.rows for layer in layers for source in layer.sources)
    total += sum(len(layer.gone) for layer in layers)
    steps = min(total // max(rows_at_once, 1) + 1, names.BUCKETS)
    runs = [names.server_buckets(step, steps) for step in range(steps)]
    for first, last in runs if buckets is None else [buckets]:
        pieces = []
        for number, (keys, begins) in enumerate(gone):
            here = keys[begins[first] : begins[last]]
            pieces.append(_Piece(here, number, None))
            for source, starts in files[number]:
                begin, end = int(starts[first]), int(starts[last])
                here = source.column("keys", begin, end)
                pieces.append(_Piece(here, number, source, begin, end))
        yield _merge(pieces, salt, columns, (first, last), table)


def _by_bucket(keys: Keys, salt: int) -> tuple[Keys, npt.NDArray[np.int64]]:
    """Keys in the order of buckets, and the first one of each bucket."""
    buckets = names.buckets_of(keys, salt)
    order = np.argsort(buckets, kind="stable")
    begins = np.searchsorted(buckets[order], np.arange(names.BUCKETS + 1))
    return keys[order], begins


def _merge(
    pieces: Sequence[_Piece],
    salt: int,
    columns: Sequence[str],
    buckets: tuple[int, int],
    table: str,
) -> Run:
    keys = np.concatenate([np.empty(0, np.int64), *(one.keys for one in pieces)])
    sizes = [len(one.keys) for one in pieces]
    # Rows of a layer come after what the same layer says is gone, and so win.
    ranks = [2 * one.layer + (one.source is not None) for one in pieces]
    rank = np.repeat(np.array(ranks, np.int64), sizes)
    bucket = names.buckets_of(keys, salt)
    order = np.lexsort((rank, keys, bucket))
    sorted_keys, sorted_rank = keys[order], rank[order]
    same = sorted_keys[1:] == sorted_keys[:-1]
    twice = same & (sorted_rank[1:] == sorted_rank[:-1]) & (sorted_rank[1:] % 2 == 1)
    if twice.any():
        raise SnapshotCorruptError(
            f"table {table!r} has more than one row of key "
            f"{sorted_keys[1:][twice][0]} in one snapshot. Take another snapshot.",
            table=table,
        )
    newest = np.append(~same, True)[: len(keys)]
    chosen = order[newest & (sorted_rank % 2 == 1)]
    return Run(
        *buckets,
        keys[chosen],
        bucket[chosen],
        rank[chosen] // 2,
        _gather(pieces, sizes, chosen, columns),
    )


def _gather(
    pieces: Sequence[_Piece],
    sizes: Sequence[int],
    chosen: npt.NDArray[np.int64],
    columns: Sequence[str],
) -> dict[str, Array]:
    """Columns of the chosen rows, which count over all pieces one after the other."""
    found: dict[str, Array] = {}
    begin = 0
    for piece, size in zip(pieces, sizes, strict=True):
        if piece.source is not None:
            here = (begin <= chosen) & (chosen < begin + size)
            rows = chosen[here] - begin
            for name in columns:
                column = piece.source.column(name, piece.begin, piece.end)
                if name not in found:
                    shape = (len(chosen), *column.shape[1:])
                    found[name] = np.empty(shape, column.dtype)
                found[name][here] = column[rows]
        begin += size
    return found
