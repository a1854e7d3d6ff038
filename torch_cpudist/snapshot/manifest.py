# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The manifest of a snapshot: what it consists of, and the checksums of all of it.

Written last, it makes the snapshot exist. ``to_json`` is the bytes of the file
``manifest.json``, ``from_json`` believes nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot import entries, names
from torch_cpudist.snapshot.checked_json import Fields, Malformed, plain
from torch_cpudist.snapshot.entries import (
    CHUNK_BYTES,
    Base,
    Block,
    Dense,
    DenseState,
    File,
    Rule,
    StateSlice,
    Table,
    Trainer,
    Version,
)
from torch_cpudist.snapshot.sealed import check_unique, checksum_of, seal, unseal

FORMAT = 1
#: Of a snapshot that has a base, so that who knows only the other refuses it.
CHANGES_FORMAT = 2
#: Of a snapshot with a table of any key, with a base or without one.
OPEN_FORMAT = 3


@dataclass(frozen=True)
class Manifest:
    """Everything about a snapshot.

    Attributes:
        name: of the snapshot and its directory.
        number: of the cut: increases within a run.
        strategy: the strategy's name.
        options: the strategy's, as values of JSON.
        version: of the parameter set.
        servers: how many there were; 0 where trainers hold all parameters.
        trainers: files of those that took part, by rank.
        tables: by their index.
        dense: by their index.
        average_decay: of the moving average; 0 for none.
        param_groups: options of torch's groups, as values of JSON.
        files: of the servers.
        param_set: which of the run's optimizers this is.
        commit: counts the snapshots committed to a directory; the newest has the
            largest. Filled in by the commit.
        time: when it was committed, in UTC; for people only.
        package: version of this package that wrote it.
        base: the snapshot over which the rows of this one are put; ``None``: it has
            all rows.
        crc32c: what the file ends in; 0 before it is written.
    """

    name: str
    number: int
    strategy: str
    version: Version
    servers: int
    options: Mapping[str, Any] = field(default_factory=dict)
    trainers: tuple[Trainer, ...] = ()
    tables: tuple[Table, ...] = ()
    dense: tuple[Dense, ...] = ()
    average_decay: float = 0.0
    param_groups: tuple[Mapping[str, Any], ...] = ()
    files: tuple[File, ...] = ()
    param_set: int = 0
    commit: int = 0
    time: str = ""
    package: str = ""
    base: Base | None = None
    crc32c: int = field(default=0, compare=False)

    def table_index(self, name: str) -> int:
        """The index of a table.

        Raises:
            SnapshotError: there is none of that name.
        """
        for index, table in enumerate(self.tables):
            if table.name == name:
                return index
        known = [table.name for table in self.tables]
        raise SnapshotError(f"snapshot {self.name}: no table {name!r}, only {known}")

    def dense_index(self, name: str) -> int:
        """The index of a dense parameter.

        Raises:
            SnapshotError: there is none of that name.
        """
        for index, dense in enumerate(self.dense):
            if dense.name == name:
                return index
        known = [dense.name for dense in self.dense]
        raise SnapshotError(
            f"snapshot {self.name}: no dense parameter {name!r}, only {known}"
        )

    def table_files(self, table: int) -> tuple[File, ...]:
        """The parts of a table, by server and part."""
        return tuple(file for file in self.files if file.table == table)

    def file(self, name: str) -> File:
        """A file of a server by its name.

        Raises:
            SnapshotError: there is none.
        """
        for file in self.files:
            if file.name == name:
                return file
        raise SnapshotError(f"snapshot {self.name}: no file {name!r}")

    def to_json(self) -> bytes:
        """The bytes of ``manifest.json``.

        Raises:
            SnapshotError: a field is not what it can be; ``from_json`` would refuse it.
        """
        text = _write(self)
        try:
            _read(text)
        except Malformed as error:
            raise SnapshotError(
                f"snapshot {self.name}: its manifest cannot be written: {error}"
            ) from error
        return text

    @classmethod
    def from_json(cls, contents: bytes | memoryview, name: str = "") -> Manifest:
        """Reads ``manifest.json`` and checks everything that can be.

        Args:
            contents: the file.
            name: the directory's, which has to be the snapshot's; empty: any.

        Raises:
            SnapshotCorruptError: a bit of it has changed, or it is not of this format.
            SnapshotError: a later release wrote it.
        """
        shown = f"snapshot {name}" if name else "snapshot"
        try:
            manifest = _read(bytes(contents))
            if name and manifest.name != name:
                raise Malformed(
                    f"it is of snapshot {manifest.name!r}, whose directory has to "
                    "have that name"
                )
        except Malformed as error:
            raise SnapshotCorruptError(
                f"{shown}: {names.MANIFEST} is damaged: {error}. Take another "
                "snapshot, or bring this one back from a copy.",
                names.MANIFEST,
            ) from error
        return manifest


# ---- writing -----------------------------------------------------------------------


def _format_of(manifest: Manifest) -> int:
    if any(table.open is not None for table in manifest.tables):
        return OPEN_FORMAT
    return FORMAT if manifest.base is None else CHANGES_FORMAT


def _write(manifest: Manifest) -> bytes:
    version = {k: str(v) for k, v in vars(manifest.version).items()}
    trainers = [
        {**vars(one), "crc32c": f"{one.crc32c:08x}", "steps": str(one.steps)}
        for one in manifest.trainers
    ]
    files = [{**vars(one), "crc32c": list(one.crc32c)} for one in manifest.files]
    known, base = _format_of(manifest), manifest.base
    fields = {
        "format": known,
        "package": manifest.package,
        "name": manifest.name,
        **({} if base is None else {"base": entries.base_json(base)}),
        "number": str(manifest.number),
        "param_set": manifest.param_set,
        "commit": str(manifest.commit),
        "time": manifest.time,
        "strategy": {"name": manifest.strategy, "options": manifest.options},
        "version": version,
        "servers": manifest.servers,
        "trainers": trainers,
        "tables": [
            entries.table_json(table, known == OPEN_FORMAT) for table in manifest.tables
        ],
        "dense": [entries.dense_json(dense) for dense in manifest.dense],
        "average_decay": manifest.average_decay,
        "param_groups": list(manifest.param_groups),
        "files": files,
    }
    try:
        checked = {name: plain(value, name) for name, value in fields.items()}
    except Malformed as error:
        raise SnapshotError(
            f"snapshot {manifest.name}: its manifest cannot be written: {error}"
        ) from error
    return seal(checked)


# ---- reading -----------------------------------------------------------------------


def _read(contents: bytes) -> Manifest:
    fields = unseal(contents, "manifest")
    known = fields.number("format")
    if known not in (FORMAT, CHANGES_FORMAT, OPEN_FORMAT):
        raise SnapshotError(
            f"a snapshot of format {known}, and this release of torch_cpudist reads "
            f"formats {FORMAT} to {OPEN_FORMAT}: install the one that wrote it, or a "
            "later one"
        )
    base = None
    if known == CHANGES_FORMAT or (known == OPEN_FORMAT and fields.has("base")):
        base = entries.read_base(fields.take("base"), "manifest.base")
    read_table = partial(entries.read_table, opened=known == OPEN_FORMAT)
    strategy = Fields(fields.take("strategy"), "manifest.strategy")
    manifest = Manifest(
        package=fields.text("package"),
        name=fields.text("name", names.SNAPSHOT),
        number=fields.long("number"),
        param_set=fields.number("param_set"),
        commit=fields.long("commit"),
        time=fields.text("time"),
        strategy=strategy.text("name"),
        options=strategy.mapping("options"),
        version=entries.read_version(fields.take("version"), "manifest.version"),
        servers=fields.number("servers", most=names.BUCKETS),
        trainers=fields.each("trainers", entries.read_trainer),
        tables=fields.each("tables", read_table),
        dense=fields.each("dense", entries.read_dense),
        average_decay=fields.real("average_decay"),
        param_groups=fields.each("param_groups", _read_group),
        files=fields.each("files", entries.read_file),
        base=base,
        crc32c=checksum_of(contents),
    )
    strategy.done()
    fields.done()
    _check_whole(manifest)
    return manifest


def _read_group(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{where}: expected an object")
    return value


def _check_whole(manifest: Manifest) -> None:
    """Checks what fields have to do with each other."""
    check_unique("manifest.trainers", [one.rank for one in manifest.trainers])
    check_unique("manifest.tables", [one.name for one in manifest.tables])
    check_unique("manifest.dense", [one.name for one in manifest.dense])
    check_unique("manifest.files", [one.name for one in manifest.files])
    blocks = [block for dense in manifest.dense for block in dense.blocks]
    check_unique("manifest.dense.blocks", [block.name for block in blocks])
    if not 0 <= manifest.average_decay < 1:
        raise Malformed(f"manifest.average_decay: {manifest.average_decay}")
    held = set()
    for file in manifest.files:
        part = names.part_name(file.name)
        if part is None or part.server >= manifest.servers:
            raise Malformed(f"manifest.files: {file.name} is of no server")
        if part.gone:
            if manifest.base is None:
                raise Malformed(f"manifest.files: {file.name}, and all rows are here")
        elif part.table is None:
            held.add(part.server)
        elif part.table >= len(manifest.tables):
            raise Malformed(f"manifest.files: {file.name} is of no table")
    for block in blocks:
        if block.server not in held:
            raise Malformed(f"manifest.dense: no file has block {block.name!r}")
    _check_parts(manifest)


def _check_parts(manifest: Manifest) -> None:
    """Checks that parts of one server and table are numbered from 0, none missing."""
    counted: dict[tuple[int, int], list[int]] = {}
    for file in manifest.files:
        part = names.part_name(file.name)
        if part is not None and part.table is not None:
            counted.setdefault((part.server, part.table), []).append(part.part)
    for (server, table), parts in counted.items():
        absent = set(range(len(parts))) - set(parts)
        if absent:
            first = names.PartName(server, table, min(absent))
            raise Malformed(f"manifest.files: {first} is missing")


__all__ = [
    "CHANGES_FORMAT",
    "CHUNK_BYTES",
    "FORMAT",
    "OPEN_FORMAT",
    "Base",
    "Block",
    "Dense",
    "DenseState",
    "File",
    "Manifest",
    "Rule",
    "StateSlice",
    "Table",
    "Trainer",
    "Version",
]
