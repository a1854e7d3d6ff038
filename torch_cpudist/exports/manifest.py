# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The manifest of an export: what it consists of, and the checksums of all of it.

Written last, it makes the export exist. ``to_json`` is the bytes of the file
``manifest.json``, ``from_json`` believes nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.exports import names
from torch_cpudist.exports.encoding import DTYPES
from torch_cpudist.snapshot import entries
from torch_cpudist.snapshot.checked_json import (
    U32,
    Fields,
    Malformed,
    in_range,
    plain,
)
from torch_cpudist.snapshot.entries import CHUNK_BYTES, Version
from torch_cpudist.snapshot.names import BUCKETS, table_salt
from torch_cpudist.snapshot.sealed import check_unique, seal, unseal

FORMAT = 1
#: Of an export with a table of any key, so that who knows only the other refuses it.
OPEN_FORMAT = 2
KIND = "torch_cpudist.export"
_ID = "[0-9a-f]{32}"
# A directory's own name, of which nothing leads out of where it lies.
_FOLDER = r"(?!\.{1,2}$)[^/\x00]{1,255}"


@dataclass(frozen=True)
class Table:
    """A table whose rows are in files by key.

    Attributes:
        name: of the parameter.
        rows: valid keys are 0 to rows - 1; which ones have a row, the files say.
        dim: elements of a row.
        seed: of ``initial``.
        initial: steps (name, a, b) that make the rows that are in no file.
        overrides: (begin, end, value): rows of those that are constant; later ones win.
        open: any int64 is a key, and ``rows`` is nominal.
    """

    name: str
    rows: int
    dim: int
    seed: int
    initial: tuple[tuple[str, float, float], ...]
    overrides: tuple[tuple[int, int, float], ...]
    open: bool = False

    @property
    def salt(self) -> int:
        """What spreads its keys over buckets."""
        return table_salt(self.name)


@dataclass(frozen=True)
class File:
    """A file of an export.

    Attributes:
        name: see ``names``.
        bytes: its size.
        table: index of the table; ``None`` for the model's.
        rows: how many, or keys that are gone.
        buckets: the first one, and the one after the last one.
        crc32c: CRC-32C of every 256 KiB, the last of what is left.
    """

    name: str
    bytes: int
    table: int | None
    rows: int
    buckets: tuple[int, int]
    crc32c: tuple[int, ...]


@dataclass(frozen=True)
class Base:
    """The export that a delta is of: its directory's name, and its ``id``."""

    name: str
    id: str


@dataclass(frozen=True)
class Manifest:
    """Everything about an export.

    Attributes:
        id: its own, 32 hexadecimal digits.
        dtype: of rows: ``"fp32"``, ``"fp16"``, ``"bf16"`` or ``"int8"``.
        averaged: whether values are moving averages.
        version: of the parameters.
        snapshot: whose values they are; empty for a model's own.
        base: of a delta; ``None`` for all of a model.
        tables: by their index.
        files: of rows and of the model.
        time: when it was made, in UTC; for people only.
        package: version of this package that wrote it.
    """

    id: str
    dtype: str
    averaged: bool = False
    version: Version = field(default_factory=Version)
    snapshot: str = ""
    base: Base | None = None
    tables: tuple[Table, ...] = ()
    files: tuple[File, ...] = ()
    time: str = ""
    package: str = ""

    def table_index(self, name: str) -> int | None:
        """The index of a table; ``None`` if its rows are in no files of their own."""
        for index, table in enumerate(self.tables):
            if table.name == name:
                return index
        return None

    def table_files(self, table: int) -> tuple[File, ...]:
        """The files of a table, gone keys too."""
        return tuple(file for file in self.files if file.table == table)

    def to_json(self) -> bytes:
        """The bytes of ``manifest.json``.

        Raises:
            SnapshotError: a field is not what it can be; ``from_json`` would refuse it.
        """
        try:
            contents = seal({n: plain(v, n) for n, v in _fields(self).items()})
            _read(contents)
        except Malformed as error:
            raise SnapshotError(
                f"the manifest of an export cannot be written: {error}"
            ) from error
        return contents

    @classmethod
    def from_json(cls, contents: bytes, name: str) -> Manifest:
        """Reads ``manifest.json`` and checks everything that can be.

        Args:
            contents: the file.
            name: of the export's directory, for messages.

        Raises:
            SnapshotCorruptError: a bit of it has changed, or it is not of this format.
            SnapshotError: a later release wrote it.
        """
        try:
            return _read(contents)
        except Malformed as error:
            raise SnapshotCorruptError(
                f"export {name}: {names.MANIFEST} is damaged: {error}. Export the "
                "model again, or bring the file back from a copy.",
                names.MANIFEST,
            ) from error


def _fields(manifest: Manifest) -> dict[str, Any]:
    opened = any(one.open for one in manifest.tables)
    tables = [
        {
            **({"open": one.open} if opened else {}),
            "name": one.name,
            "rows": str(one.rows),
            "dim": one.dim,
            "salt": f"{one.salt:016x}",
            "seed": str(one.seed),
            "initial": [list(step) for step in one.initial],
            "overrides": [[str(b), str(e), v] for b, e, v in one.overrides],
        }
        for one in manifest.tables
    ]
    files = [
        {**vars(one), "buckets": list(one.buckets), "crc32c": list(one.crc32c)}
        for one in manifest.files
    ]
    return {
        "kind": KIND,
        "format": OPEN_FORMAT if opened else FORMAT,
        "package": manifest.package,
        "time": manifest.time,
        "id": manifest.id,
        "dtype": manifest.dtype,
        "averaged": manifest.averaged,
        "version": {k: str(v) for k, v in vars(manifest.version).items()},
        "snapshot": manifest.snapshot,
        "base": None if manifest.base is None else vars(manifest.base),
        "tables": tables,
        "files": files,
    }


def _read(contents: bytes) -> Manifest:
    fields = unseal(contents, "manifest")
    fields.text("kind", KIND.replace(".", r"\."))
    known = fields.number("format")
    if known not in (FORMAT, OPEN_FORMAT):
        raise SnapshotError(
            f"an export of format {known}, and this release of torch_cpudist reads "
            f"formats {FORMAT} and {OPEN_FORMAT}: install the one that wrote it, or a "
            "later one"
        )
    read_table = partial(_read_table, opened=known == OPEN_FORMAT)
    base = fields.take("base")
    manifest = Manifest(
        package=fields.text("package"),
        time=fields.text("time"),
        id=fields.text("id", _ID),
        dtype=fields.text("dtype", "|".join(DTYPES)),
        averaged=fields.truth("averaged"),
        version=entries.read_version(fields.take("version"), "manifest.version"),
        snapshot=fields.text("snapshot"),
        base=None if base is None else _read_base(base, "manifest.base"),
        tables=fields.each("tables", read_table),
        files=fields.each("files", _read_file),
    )
    fields.done()
    _check_whole(manifest)
    return manifest


def _read_base(value: Any, where: str) -> Base:
    fields = Fields(value, where)
    base = Base(fields.text("name", _FOLDER), fields.text("id", _ID))
    fields.done()
    return base


def _read_table(value: Any, where: str, opened: bool) -> Table:
    fields = Fields(value, where)
    salt = int(fields.text("salt", "[0-9a-f]{16}"), 16)
    table = Table(
        name=fields.text("name"),
        rows=fields.long("rows", most=2**62),
        dim=fields.number("dim", least=1, most=2**20),
        seed=fields.long("seed"),
        initial=fields.each("initial", entries.read_step),
        overrides=fields.each("overrides", entries.read_override),
        open=fields.truth("open") if opened else False,
    )
    fields.done()
    if salt != table.salt:
        raise Malformed(f"{where}: salt {salt:016x} is not of {table.name!r}")
    return table


def _bucket(value: Any, where: str) -> int:
    return in_range(value, where, 0, BUCKETS)


def _read_file(value: Any, where: str) -> File:
    fields = Fields(value, where)
    table = fields.take("table")
    buckets = fields.each("buckets", _bucket)
    file = File(
        name=fields.text("name"),
        bytes=fields.number("bytes", least=10, most=2**53),
        table=None if table is None else in_range(table, f"{where}.table", 0, U32),
        rows=fields.number("rows", most=2**31 - 1),
        buckets=(buckets[0], buckets[-1]) if len(buckets) == 2 else (1, 0),
        crc32c=fields.each("crc32c", lambda v, at: in_range(v, at, 0, U32)),
    )
    fields.done()
    try:
        found = names.table_of(file.name)
    except ValueError:
        raise Malformed(f"{where}: {file.name!r} is no file of an export") from None
    if found != file.table:
        raise Malformed(f"{where}: {file.name!r} is no file of table {file.table}")
    if file.buckets[0] > file.buckets[1]:
        raise Malformed(f"{where}.buckets: expected two in their order")
    if len(file.crc32c) != -(-file.bytes // CHUNK_BYTES):
        raise Malformed(f"{where}: {len(file.crc32c)} checksums for {file.bytes} bytes")
    return file


def _check_whole(manifest: Manifest) -> None:
    """Checks what fields have to do with each other."""
    check_unique("manifest.tables", [one.name for one in manifest.tables])
    check_unique("manifest.files", [one.name for one in manifest.files])
    if sum(file.table is None for file in manifest.files) != 1:
        raise Malformed(f"manifest.files: expected {names.MODEL} once")
    ends = [0] * len(manifest.tables)
    for file in manifest.files:
        if file.table is None:
            continue
        if file.table >= len(ends):
            raise Malformed(f"manifest.files: {file.name} is of no table")
        if names.is_gone(file.name):
            if manifest.base is None:
                raise Malformed(f"manifest.files: {file.name} of an export of all")
            continue
        if file.buckets[0] < ends[file.table]:
            raise Malformed(f"manifest.files: {file.name} has buckets of another file")
        ends[file.table] = file.buckets[1]
    for index in range(len(ends)):
        rows = [f for f in manifest.table_files(index) if not names.is_gone(f.name)]
        expected = [names.rows_name(index, part) for part in range(len(rows))]
        if [file.name for file in rows] != expected:
            raise Malformed(f"manifest.files: those of table {index} are not in order")
