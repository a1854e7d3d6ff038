# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parquet files, read by pyarrow, as arrays by slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from torch_cpudist import _core
from torch_cpudist.data.reading import remote
from torch_cpudist.data.reading.schema import Slot
from torch_cpudist.errors import BadRecordError, ConfigurationError, DataFileError

RECORDS_PER_PIECE = 8192
Values = np.ndarray[Any, np.dtype[Any]]
Column = tuple[Values, Values | None]  # values; offsets of a slot of any number


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError(
            "format='parquet' needs the package pyarrow: pip install pyarrow"
        ) from error
    return pyarrow


@contextmanager
def source_of(path: str) -> Iterator[Any]:
    """What pyarrow reads: a path, which it opens without the GIL, or an open file.

    Raises:
        DataFileError, ConfigurationError: see ``remote.opened``.
    """
    if not remote.is_remote(path):
        yield path
        return
    with remote.failures_of(path), remote.opened(path) as file:
        yield file


def row_groups(path: str) -> list[int]:
    """The bytes of every row group of a file.

    Raises:
        DataFileError: it is no Parquet file, or cannot be read.
        ConfigurationError: pyarrow is not installed.
    """
    pyarrow = _pyarrow()
    try:
        with source_of(path) as source:
            metadata = pyarrow.parquet.read_metadata(source)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataFileError(f"{path}: {error}") from error
    groups = range(metadata.num_row_groups)
    return [metadata.row_group(group).total_byte_size for group in groups]


def _records_before(metadata: Any, groups: Sequence[int] | None) -> int:
    """Records of a file before the first of some row groups."""
    first = groups[0] if groups else 0
    return sum(metadata.row_group(group).num_rows for group in range(first))


class ParquetReader:
    """Reads the columns that slots need, and turns them into arrays.

    Args:
        slots: of the schema, unused ones included.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._pyarrow = _pyarrow()
        self._slots = [(index, slot) for index, slot in enumerate(slots) if slot.used]
        self._columns = list(
            dict.fromkeys(
                name for _, slot in self._slots for name in slot.columns or ()
            )
        )

    def read(
        self, source: Any, path: str, groups: Sequence[int] | None
    ) -> Iterator[tuple[int, list[Column]]]:
        """Yields the records of some row groups, or of all, piece by piece.

        Args:
            source: a path or a binary file.
            path: what messages call it.
            groups: numbers of row groups; default: all.

        Raises:
            DataFileError: no Parquet file, or damaged.
            BadRecordError: a column is missing or of another type than its slot.
        """
        try:
            with self._pyarrow.parquet.ParquetFile(source) as file:
                missing = set(self._columns) - set(file.schema_arrow.names)
                if missing:
                    raise BadRecordError(
                        f"{path}: expected columns {sorted(missing)}, found "
                        f"{file.schema_arrow.names}"
                    )
                first = _records_before(file.metadata, groups)
                for batch in file.iter_batches(
                    RECORDS_PER_PIECE,
                    row_groups=groups,
                    columns=self._columns,
                    use_threads=False,
                ):
                    where = f"{path}: records {first} to {first + batch.num_rows - 1}"
                    first += batch.num_rows
                    yield (
                        batch.num_rows,
                        [
                            self._column(where, batch, index, slot)
                            for index, slot in self._slots
                        ],
                    )
        except (OSError, self._pyarrow.ArrowInvalid) as error:
            raise DataFileError(f"{path}: {error}") from error

    def _column(self, where: str, batch: Any, index: int, slot: Slot) -> Column:
        arrays = [batch.column(name) for name in slot.columns or ()]
        types = self._pyarrow.types
        lists = types.is_list(arrays[0].type) or types.is_large_list(arrays[0].type)
        fixed = types.is_fixed_size_list(arrays[0].type)
        if slot.dim is None:
            return self._bags(where, arrays[0], index, slot, lists)
        if len(arrays) == 1 and (lists or fixed):
            flat = self._of_lists(where, arrays[0], slot)
            return self._numbers(where, flat, index, slot), None
        if len(arrays) != slot.dim:
            raise BadRecordError(
                f"{where}, slot {slot.name!r}: expected lists of {slot.dim} values in "
                f"column {slot.columns}, found {arrays[0].type}"
            )
        columns = [self._numbers(where, array, index, slot) for array in arrays]
        return np.ascontiguousarray(np.stack(columns, axis=1)).reshape(-1), None

    def _bags(
        self, where: str, array: Any, index: int, slot: Slot, lists: bool
    ) -> Column:
        """Lists become bags; a null is an empty one, and a lone value a bag of one."""
        if lists:
            offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
            counts = np.diff(offsets)
            counts[array.is_null().to_numpy(zero_copy_only=False)] = 0
            flat = array.flatten()  # leaves out what nulls point to
            if flat.null_count:
                raise BadRecordError(
                    f"{where}, slot {slot.name!r}: expected values, found a null in a "
                    "list"
                )
        else:
            flat = array.drop_null()
            counts = array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        begins = np.zeros(len(counts) + 1, dtype=np.int64)
        np.cumsum(counts, out=begins[1:])
        return self._numbers(where, flat, index, slot), begins

    def _of_lists(self, where: str, array: Any, slot: Slot) -> Any:
        flat = array.flatten()
        sizes = set(self._pyarrow.compute.list_value_length(array).to_pylist())
        if sizes - {slot.dim} or len(flat) != len(array) * (slot.dim or 1):
            raise BadRecordError(
                f"{where}, slot {slot.name!r}: expected lists of {slot.dim} values, "
                f"found lengths {sorted(sizes, key=str)}"
            )
        return flat

    def _numbers(self, where: str, array: Any, index: int, slot: Slot) -> Values:
        types = self._pyarrow.types
        kind = array.type
        if types.is_dictionary(kind):
            array = array.dictionary_decode()
            kind = array.type
        if slot.hash_range is not None:
            return self._hashed(where, array, index, slot)
        fits = types.is_integer(kind) or types.is_boolean(kind)
        if not slot.integers:
            fits = fits or types.is_floating(kind)
        if not fits:
            wanted = "whole numbers" if slot.integers else "numbers"
            raise BadRecordError(
                f"{where}, slot {slot.name!r}: expected {wanted}, found {kind}"
            )
        target = self._pyarrow.int64() if slot.integers else self._pyarrow.float32()
        try:
            # Whole numbers must fit; to float32 every number is rounded.
            numbers = array.cast(target, safe=slot.integers)
        except self._pyarrow.ArrowInvalid as error:
            raise BadRecordError(f"{where}, slot {slot.name!r}: {error}") from error
        if numbers.null_count:  # only now: the column's type need not hold it
            numbers = numbers.fill_null(self._pyarrow.scalar(slot.missing, target))
        values: Values = numbers.to_numpy(zero_copy_only=False)
        if not slot.integers and not np.isfinite(values).all():
            raise BadRecordError(
                f"{where}, slot {slot.name!r}: expected finite numbers, found NaN or "
                "an infinite one"
            )
        return np.ascontiguousarray(values)

    def _hashed(self, where: str, array: Any, index: int, slot: Slot) -> Values:
        """Hashes values as the other formats hash their text."""
        if self._pyarrow.types.is_integer(array.type):
            array = array.cast(self._pyarrow.large_string())
        try:
            texts = array.cast(self._pyarrow.large_binary())
        except (
            self._pyarrow.ArrowInvalid,
            self._pyarrow.ArrowNotImplementedError,
        ) as error:
            raise BadRecordError(
                f"{where}, slot {slot.name!r}: expected texts or whole numbers, which "
                f"can be hashed, found {array.type}"
            ) from error
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        _, offsets, data = texts.fill_null(b"").buffers()
        begin = texts.offset
        ends = np.frombuffer(offsets, dtype=np.int64)[begin : begin + len(texts) + 1]
        ids = _core.hash_texts(
            np.ascontiguousarray(ends),
            data.to_pybytes() if data is not None else b"",
            index,
            slot.hash_range or 0,
        )
        ids[~valid] = slot.missing
        return np.ascontiguousarray(ids)
