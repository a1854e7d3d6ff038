# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The contents of a file of rows, in the pieces that it is written of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from torch_cpudist.exports import names
from torch_cpudist.exports.manifest import File, Table
from torch_cpudist.exports.rows_file import FORMAT, GONE, VERSION, expected_columns
from torch_cpudist.snapshot.names import buckets_of
from torch_cpudist.snapshot.parts import Array
from torch_cpudist.snapshot.tensors import make_header


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array, row by row."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def by_bucket(
    keys: npt.NDArray[np.int64], salt: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Keys in the order of files, and the bucket of each."""
    buckets = buckets_of(keys, salt)
    order = np.lexsort((keys, buckets))
    return keys[order], buckets[order]


def packed(
    file: File,
    table: Table,
    dtype: str,
    columns: Mapping[str, Array],
    buckets: npt.NDArray[np.uint64],
) -> list[memoryview]:
    """A file of rows, or of gone keys.

    Args:
        file: its name, rows and buckets.
        table: whose rows.
        dtype: of its rows.
        columns: all but ``bucket_begin``.
        buckets: of each row.
    """
    first, last = file.buckets
    begins = np.searchsorted(buckets.astype(np.int64), np.arange(first, last + 1))
    found = {**columns, "bucket_begin": begins.astype(np.int32)}
    expected = expected_columns(table, file, dtype)
    kind = GONE if names.is_gone(file.name) else FORMAT
    head, _ = make_header(expected, {"format": kind, "version": VERSION})
    return [memoryview(head), *(bytes_of(found[column]) for column in expected)]
