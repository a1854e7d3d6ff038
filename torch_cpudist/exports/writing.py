# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes an export: files of rows, the model's, and last the manifest."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from torch_cpudist._version import __version__
from torch_cpudist.errors import InvalidArgumentError, SnapshotError
from torch_cpudist.exports import names
from torch_cpudist.exports.encoding import narrow
from torch_cpudist.exports.lazily import Stored, as_it_is, narrowed
from torch_cpudist.exports.manifest import Base, File, Manifest, Table
from torch_cpudist.exports.pieces import by_bucket, packed
from torch_cpudist.exports.reading import MODEL_FORMAT, MODEL_VERSION, SCALE, Export
from torch_cpudist.snapshot.checksums import Checksums
from torch_cpudist.snapshot.files import Files, reported, write_durably
from torch_cpudist.snapshot.merging import Layer, Run, merged
from torch_cpudist.snapshot.parts import Array
from torch_cpudist.snapshot.tensors import ITEM_BYTES, make_header

_FILE_SYSTEM = Files()
#: A file of rows gets no more of them once it has so much.
PART_BYTES = 32 << 20
_ROWS_AT_ONCE = 1 << 18
_WRITABLE = "Make the directory writable and see that there is space."


@dataclass(frozen=True)
class Rows:
    """Rows of a run of buckets, by bucket and key.

    Attributes:
        first: the first bucket.
        last: the bucket after the last one.
        keys: int64 ``[rows]``.
        buckets: of each row.
        columns: ``weight``, and ``scale`` of int8; none of keys that are gone.
    """

    first: int
    last: int
    keys: npt.NDArray[np.int64]
    buckets: npt.NDArray[np.uint64]
    columns: Mapping[str, Array]


class Writer:
    """Writes one export; only one thread of one process may.

    Args:
        path: a directory that is not there, or is empty, or has what an export that did
            not end has left, which a file says that is written first.
        manifest: what is known of it; files, time and package are filled in.
        files: the file system.
        bases: for a delta, the chain that it goes on from, the whole one first.

    Raises:
        SnapshotError: an export is there already, or files of others.
        InvalidArgumentError: it cannot be there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        manifest: Manifest,
        files: Files = _FILE_SYSTEM,
        bases: Sequence[Export] = (),
    ) -> None:
        self.folder = names.folder_of(path)
        self._files = files
        self._bases = bases
        self._manifest = replace(manifest, base=_base_of(self.folder, bases))
        self._written: list[File] = []
        with self._reported():
            self._prepare(check_free(self.folder, files))

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        with reported(f"export: cannot write {self.folder}", _WRITABLE):
            yield

    def _prepare(self, left: Sequence[str]) -> None:
        """Makes the directory, without what an export that did not end has left."""
        for name in left:
            if name != names.BEGUN:
                self._files.unlink(self.folder / name)
        self._files.make_directory(self.folder)
        self._files.sync_directory(self.folder.parent)
        if names.BEGUN not in left:
            text = b"An export is being written here, or was not written to its end.\n"
            write_durably(self._files, self.folder / names.BEGUN, [text])

    # ---- rows ----------------------------------------------------------------------

    def add_table(self, index: int, runs: Iterable[Run]) -> int:
        """Writes the rows of a table: all, or of a delta those that differ.

        Args:
            index: of the table in the manifest.
            runs: all its rows as float32 ``weight``, by bucket and key.

        Returns:
            How many were written.

        Raises:
            SnapshotError: the file system refuses.
            SnapshotCorruptError: a file of the base is not as it was written.

        Cost: memory of some tens of MB, whatever the table's size.
        """
        table = self._manifest.tables[index]
        gone: list[npt.NDArray[np.int64]] = []
        pending: list[Rows] = []
        size = total = part = 0
        for rows in self._differing(table, runs, gone):
            if pending and size > 0 and size + _bytes(rows) > PART_BYTES:
                part += self._write_rows(index, part, pending)
                pending, size = [], 0
            pending.append(rows)
            size += _bytes(rows)
            total += len(rows.keys)
        self._write_rows(index, part, pending)
        keys = np.concatenate([np.empty(0, np.int64), *gone])
        if len(keys):
            self._write_gone(index, table, keys)
        return total

    def _differing(
        self, table: Table, runs: Iterable[Run], gone: list[npt.NDArray[np.int64]]
    ) -> Iterator[Rows]:
        """Rows as they are kept; of a delta those that differ, and what is gone."""
        dtype = self._manifest.dtype
        known = _Known([one.layer(table.name) for one in self._bases], table, dtype)
        for run in runs:
            columns = narrow(run.columns["weight"], dtype) if run.columns else {}
            rows = Rows(run.first, run.last, run.keys, run.buckets, columns)
            if not self._bases:
                yield rows
                continue
            yield known.differing(rows, gone)

    def _write_rows(self, index: int, part: int, runs: Sequence[Rows]) -> int:
        """Writes a part; returns 1 if there was something to write."""
        runs = [run for run in runs if len(run.keys)]
        if not runs:
            return 0
        columns = {
            name: np.concatenate([run.columns[name] for run in runs])
            for name in runs[0].columns
        }
        keys = np.concatenate([run.keys for run in runs])
        buckets = np.concatenate([run.buckets for run in runs])
        self._write(
            index,
            names.rows_name(index, part),
            (runs[0].first, runs[-1].last),
            {"keys": keys, **columns},
            buckets,
        )
        return 1

    def _write_gone(
        self, index: int, table: Table, keys: npt.NDArray[np.int64]
    ) -> None:
        found, buckets = by_bucket(keys, table.salt)
        name = names.gone_name(index)
        span = int(buckets[0]), int(buckets[-1]) + 1
        self._write(index, name, span, {"keys": found}, buckets)

    def _write(
        self,
        index: int,
        name: str,
        span: tuple[int, int],
        columns: Mapping[str, Array],
        buckets: npt.NDArray[np.uint64],
    ) -> None:
        """Writes a file of rows, or of gone keys."""
        file = File(name, 0, index, len(buckets), span, ())
        table, dtype = self._manifest.tables[index], self._manifest.dtype
        self._put(file, packed(file, table, dtype, columns, buckets))

    def _put(self, file: File, pieces: Iterable[memoryview]) -> None:
        sums = Checksums()
        with self._reported():
            write_durably(self._files, self.folder / file.name, sums.over(pieces))
        self._written.append(replace(file, bytes=sums.size, crc32c=sums.crc32c))

    # ---- the model -----------------------------------------------------------------

    def add_model(
        self, tensors: Mapping[str, torch.Tensor], tables: Iterable[str] = ()
    ) -> None:
        """Writes everything that is in no files of rows. Once.

        Args:
            tensors: by their names in ``state_dict()``.
            tables: names of those which are rows, float32 ``[rows, dim]``, and are kept
                as rows are.

        Raises:
            SnapshotError: one is of a kind that no file can have; the file system
                refuses.
        """
        dtype, rows = self._manifest.dtype, set(tables)
        made: dict[str, Stored] = {}
        for name, tensor in tensors.items():
            if name in rows and dtype != "fp32":
                made.update(narrowed(name, tensor, dtype))
                continue
            if name.removesuffix(SCALE) in tensors.keys() - {name}:
                raise SnapshotError(
                    f"export: {name!r} is another tensor's name and {SCALE!r}, which "
                    "stands for the scales of int8 rows. Rename it."
                )
            made[name] = as_it_is(name, tensor)
        order = sorted(made, key=lambda name: -ITEM_BYTES[made[name].dtype])
        head, _ = make_header(
            {name: (made[name].dtype, made[name].shape) for name in order},
            {"format": MODEL_FORMAT, "version": MODEL_VERSION},
        )
        contents = (made[name].contents() for name in order)
        pieces = itertools.chain([memoryview(head)], contents)
        self._put(File(names.MODEL, 0, None, 0, (0, 0), ()), pieces)

    # ---- the end -------------------------------------------------------------------

    def commit(self) -> Manifest:
        """Makes the export exist.

        Returns:
            Its manifest.

        Raises:
            SnapshotError: the file system refuses. There is no export then, or, if the
                very last step failed, it may be there as a whole.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = replace(
            self._manifest, files=tuple(self._written), time=now, package=__version__
        )
        contents = manifest.to_json()
        with self._reported():
            self._files.sync_directory(self.folder)
            write_durably(self._files, self.folder / names.MANIFEST, [contents])
            self._files.unlink(self.folder / names.BEGUN)
        return manifest


def new_id() -> str:
    """An identity that no other export has."""
    return secrets.token_hex(16)


def check_free(folder: Path, files: Files = _FILE_SYSTEM) -> list[str]:
    """Checks that an export can be written to a directory.

    Returns:
        What one that did not end has left there.

    Raises:
        SnapshotError: an export is there already, or files of others, or it cannot be
            read.
    """
    with reported(f"export: cannot read {folder}", _WRITABLE):
        found = files.list(folder)
        if files.size(folder) is not None:
            raise SnapshotError(
                f"{folder} is a file. Take a path that is not there yet, or an empty "
                "directory."
            )
    if names.MANIFEST in found:
        raise SnapshotError(
            f"{folder} is an export already, and none is ever overwritten. Take "
            "another path, or remove the directory."
        )
    begun = {names.BEGUN, names.BEGUN + ".tmp"}
    ours = bool(begun & set(found))
    others = [name for name in found if not (ours and names.is_own(name))]
    if others:
        raise SnapshotError(
            f"{folder} has other files in it ({', '.join(others[:3])}). Take a path "
            "that is not there yet, or an empty directory."
        )
    return found


def _base_of(folder: Path, bases: Sequence[Export]) -> Base | None:
    if not bases:
        return None
    base = bases[-1]
    # A link may be of another one later on.
    linked, real = base.folder, base.folder.resolve()
    parent = folder.parent.resolve()
    if real.parent == parent:
        return Base(real.name, base.manifest.id)
    if linked.parent.resolve() == parent:
        return Base(linked.name, base.manifest.id)
    raise InvalidArgumentError(
        f"export: {folder} is to have what changed since {base.folder}, beside which "
        f"it has to lie. Take a path in {base.folder.parent}."
    )


def check_goes_on(folder: Path, manifest: Manifest, bases: Sequence[Export]) -> None:
    """Refuses the base of a delta that is of something else, or elsewhere.

    Raises:
        InvalidArgumentError: it is not beside ``folder``, or its rows are kept
            otherwise, or are of other tables.
    """
    if _base_of(folder, bases) is None:
        return
    base = bases[-1].manifest
    for what in ("dtype", "averaged", "tables"):
        here, there = getattr(manifest, what), getattr(base, what)
        if here != there:
            raise InvalidArgumentError(
                f"export: base {bases[-1].folder.name} has {what} {there}, this is "
                f"{here}. Export the model as a whole."
            )


def _bytes(rows: Rows) -> int:
    return rows.keys.nbytes + sum(one.nbytes for one in rows.columns.values())


class _Known:
    """What the chain of a delta has of a table."""

    def __init__(self, layers: Sequence[Layer], table: Table, dtype: str) -> None:
        self._columns = ("weight", "scale") if dtype == "int8" else ("weight",)
        self._layers = layers
        self._table = table

    def differing(self, rows: Rows, gone: list[npt.NDArray[np.int64]]) -> Rows:
        """Those of ``rows`` that are new or differ; adds keys that are gone."""
        (known,) = merged(
            self._layers,
            self._table.salt,
            self._columns,
            table=self._table.name,
            buckets=(rows.first, rows.last),
        )
        _, here, there = np.intersect1d(
            rows.keys, known.keys, assume_unique=True, return_indices=True
        )
        gone.append(np.delete(known.keys, there))
        differs = np.ones(len(rows.keys), dtype=np.bool_)
        same = np.ones(len(here), dtype=np.bool_)
        for name, column in rows.columns.items() if len(here) else ():
            one, two = column[here], known.columns[name][there]
            bits = f"u{one.dtype.itemsize}"
            equal = one.view(bits) == two.view(bits)
            same &= equal.all(axis=1) if equal.ndim > 1 else equal
        differs[here] = ~same
        columns = {name: column[differs] for name, column in rows.columns.items()}
        return replace(
            rows,
            keys=rows.keys[differs],
            buckets=rows.buckets[differs],
            columns=columns,
        )
