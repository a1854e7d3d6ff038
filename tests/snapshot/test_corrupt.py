# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every bit flip and truncation of a small snapshot is found, and its file named."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from damages import damaged
from model_files import ModelFiles
from small_snapshots import NAME, commit, write

from torch_cpudist import _core
from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.reading import Snapshot

PATH = Path("/snapshots")
FOLDER = PATH / NAME
SMALL = {"servers": 1, "trainers": 1, "tables": {"users.weight": range(9)}}


class Changed(ModelFiles):
    """Files of which one has other contents."""

    def __init__(self, whole: ModelFiles) -> None:
        super().__init__()
        self.root = whole.root
        self.path = Path()
        self.contents = b""

    def change(self, path: Path, contents: bytes) -> None:
        self.path, self.contents = path, contents

    def size(self, path: Path) -> int | None:
        return len(self.contents) if path == self.path else super().size(path)

    def read(self, path: Path) -> bytes:
        return self.contents if path == self.path else super().read(path)


@pytest.fixture(scope="module")
def small() -> ModelFiles:
    files = ModelFiles()
    commit(Directory(PATH, files), **SMALL)
    return files


FILES = [
    names.MANIFEST,
    "s000-t000-0000.safetensors",
    "s000-dense.safetensors",
    "trainer-000.json",
    "trainer-000.safetensors",
]


def read_only(snapshot: Snapshot, manifest: Manifest, name: str) -> None:
    """Uses all of one file, as those do who want what is in it."""
    if name == names.MANIFEST:
        Directory(PATH, snapshot.files).manifest(NAME)
    elif name.startswith("trainer"):
        snapshot.trainer(0)
    elif name.startswith("s000-t"):
        for part in snapshot.parts("users.weight"):
            for column in part.columns:
                part.column(column)
            part.bucket_begin()
    else:
        for dense in manifest.dense:
            snapshot.dense(dense.name)
            snapshot.dense_average(dense.name)
            snapshot.dense_state(dense.name)


def damage(snapshot, manifest, name) -> SnapshotCorruptError | None:
    try:
        read_only(snapshot, manifest, name)
    except SnapshotCorruptError as error:
        return error
    return None


def test_the_snapshot_has_no_other_files(small: ModelFiles) -> None:
    assert small.list(FOLDER) == sorted(FILES)
    assert Snapshot(FOLDER, small).verify() == []


@pytest.mark.parametrize("name", FILES)
def test_every_change_of_a_file_is_found(small: ModelFiles, name: str) -> None:
    whole = small.read(FOLDER / name)
    files = Changed(small)
    snapshot = Snapshot(FOLDER, files)
    manifest = snapshot.manifest
    table = "users.weight" if "-t000-" in name else ""
    tried = 0
    for contents in damaged(whole):
        files.change(FOLDER / name, contents)
        snapshot.forget()  # what is mapped
        error = damage(snapshot, manifest, name)
        assert error is not None, "used as if it were whole"
        assert (error.file, error.table) == (name, table)
        assert name in str(error)
        assert table in str(error)
        tried += 1
    assert tried == 9 * len(whole) + 3 > 9 * 300


@pytest.mark.parametrize("name", FILES[1:])
def test_verify_names_the_one_file_that_is_damaged(small, name) -> None:
    whole = small.read(FOLDER / name)
    files = Changed(small)
    generator = random.Random(name)
    for _ in range(20):
        contents = bytearray(whole)
        contents[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        files.change(FOLDER / name, bytes(contents))
        (error,) = Snapshot(FOLDER, files).verify()
        assert isinstance(error, SnapshotCorruptError)
        assert error.file == name


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_named(small: ModelFiles, name: str) -> None:
    files = small.settled()
    files.unlink(FOLDER / name)
    (error,) = Snapshot(FOLDER, files).verify()
    assert isinstance(error, SnapshotCorruptError)
    assert error.file == name
    assert "not there" in str(error)


def test_files_of_another_snapshot_are_not_taken(small: ModelFiles) -> None:
    """A whole and valid file, but of a later cut."""
    files = small.settled()
    commit(Directory(PATH, files), "other", **{**SMALL, "average": False})
    for name in FILES[1:]:
        one = Changed(files)
        other = files.read(PATH / "other" / name)
        if other == files.read(FOLDER / name):
            continue
        one.change(FOLDER / name, other)
        (error,) = Snapshot(FOLDER, one).verify()
        assert error.file == name
    one.change(FOLDER / names.MANIFEST, files.read(PATH / "other" / names.MANIFEST))
    with pytest.raises(SnapshotCorruptError, match="it is of snapshot 'other'"):
        Snapshot(FOLDER, one)


def test_chunks_are_checked_where_they_are_used() -> None:
    files = ModelFiles()
    path = FOLDER / "s000-t000-0000.safetensors"
    big = {"users.weight": range(12_000)}
    commit(Directory(PATH, files), servers=1, trainers=1, tables=big, part_rows=12_000)
    whole = files.read(path)
    (entry,) = Snapshot(FOLDER, files).manifest.table_files(0)
    assert len(entry.crc32c) == 3
    changed = Changed(files)
    contents = bytearray(whole)
    contents[-1] ^= 1  # in the last chunk
    changed.change(path, bytes(contents))
    (part,) = Snapshot(FOLDER, changed).parts("users.weight")
    assert part.column("weight", 0, 100).shape == (100, 4)  # in the first one
    with pytest.raises(SnapshotCorruptError, match="bytes 524288 to"):
        part.bucket_begin()
    generator = np.random.default_rng(3)
    for at in generator.integers(0, len(whole) * 8, 200):
        contents = bytearray(whole)
        contents[at // 8] ^= 1 << int(at % 8)
        changed.change(path, bytes(contents))
        (error,) = Snapshot(FOLDER, changed).verify()
        chunk = int(at) // 8 // 262144 * 262144
        assert f"bytes {chunk} to" in str(error)


def test_a_later_format_is_no_damage(small: ModelFiles) -> None:
    contents = small.read(FOLDER / names.MANIFEST)
    later = contents.replace(b'"format": 1', b'"format": 4')
    files = Changed(small)
    files.change(FOLDER / names.MANIFEST, resealed(later))
    says = r"format 4.*reads formats 1 to 3"
    with pytest.raises(SnapshotError, match=says) as raised:
        Snapshot(FOLDER, files)
    assert not isinstance(raised.value, SnapshotCorruptError)


def resealed(contents: bytes) -> bytes:
    """A manifest with the checksum that fits it."""
    body = contents[: contents.rindex(b'"crc32c"')]
    return body + b'"crc32c": "%08x"\n}\n' % _core.crc32c(body)


CASES = [
    (b'"name": "snap', b'"name": "../snap', "is not like"),
    (b'"number": "12"', b'"number": 12', "decimal number as text"),
    (b'"number": "12"', b'"number": "012"', "decimal number as text"),
    (b'"number": "12"', b'"number": "99999999999999999999"', "from 0 to"),
    (b'"servers": 1', b'"servers": 5000', "from 0 to 4096"),
    (b'"servers": 1', b'"servers": true', "whole number"),
    (b'"servers": 1', b'"servers": 0', "of no server"),
    (b'"average_decay": 0.5', b'"average_decay": 1.5', "average_decay"),
    (b'"average_decay": 0.5', b'"average_decay": NaN', "no number of JSON"),
    (b'"average_decay": 0.5', b'"average_decay": 1e999', "finite"),
    (b'"format": 1', b'"format": 1, "format": 1', "twice"),
    (b'"format": 1', b'"format": 1, "more": 1', "unknown fields"),
    (b'"param_set": 0,\n', b"", "param_set: is missing"),
    (b"trainer-000.json", b"trainer-001.json", "is not like"),
    (b"trainer-000.json", b"/etc/passwd00000", "is not like"),
    (b"s000-t000-0000.safe", b"s000-t001-0000.safe", "no name of a file"),
    (b"s000-t000-0000.safe", b"../../t000-0000.safe", "no name of a file"),
    (b"s000-t000-0000.safe", b"s000-t000-0001.safe", "s000-t000-0000.* is missing"),
    (b"s000-dense.safe", b"s001-dense.safe", "of no server"),
    (b'"offset": "8"', b'"offset": "7"', "does not fit at 8"),
    (b'"elements": "4"', b'"elements": "8"', "blocks of 16 elements, it has 12"),
    (b'"dim": 4', b'"dim": 0', "from 1 to"),
    (b'"begin": 0', b'"begin": 1', "does not begin at 0"),
    (b'"dtype": "F64"', b'"dtype": "F16"', "is not like"),
    (b'"salt": "', b'"salt": "0', "is not like"),
    (b"users.weight", b"users.heavy", "salt .* is not of"),
    (b"top.weight.block1", b"top.weight.block0", "twice"),
    (b'"strategy": {', b'"strategy": [], "x": {', "strategy: expected an object"),
    (b'"files": [', b'"files": {}, "x": [', "files: expected a list"),
]


@pytest.mark.parametrize(("old", "new", "message"), CASES)
def test_a_manifest_with_right_checksum_is_not_believed(small, old, new, message):
    contents = small.read(FOLDER / names.MANIFEST)
    assert old in contents
    files = Changed(small)
    files.change(FOLDER / names.MANIFEST, resealed(contents.replace(old, new, 1)))
    with pytest.raises(SnapshotCorruptError, match=message):
        Snapshot(FOLDER, files)


def test_a_manifest_that_would_not_be_read_is_not_written(tmp_path) -> None:
    directory = Directory(tmp_path)
    manifest = write(directory)
    for wrong in (
        dataclasses.replace(manifest, servers=1),
        dataclasses.replace(manifest, options={"decay": float("nan")}),
        dataclasses.replace(manifest, param_groups=({"fn": print},)),
        dataclasses.replace(manifest, trainers=manifest.trainers * 2),
    ):
        with pytest.raises(SnapshotError, match="manifest cannot be written"):
            directory.commit(wrong)
    assert directory.names() == []
    directory.commit(manifest)
