# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files made on purpose, checksums and all: typed errors are all that they raise."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from model_files import ModelFiles
from small_snapshots import NAME, commit, entry

from torch_cpudist import _core
from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.tools.comparing import compare
from torch_cpudist.snapshot.trainer_files import read_trainer

PATH = Path("/snapshots")
FOLDER = PATH / NAME
ROUNDS = 1000
POOL = [
    *(None, True, False, -1, 0, 1, 2, 7, 4096, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5),
    *("", "0", "1", "7", "-1", "18446744073709551615", "x", "../x", "a" * 300, "\0"),
    *("F32", "F64", "U8", "I64", [], [0], [0, 0], {}, {"$tensor": "t0"}, 1e300),
    *([2**40, 2**20], {"$tuple": [1]}, {"$items": [[0, 1]]}),
]


@pytest.fixture(scope="module")
def small() -> ModelFiles:
    files = ModelFiles()
    tables = {"users.weight": range(9), "items.weight": range(4)}
    commit(Directory(PATH, files), servers=2, trainers=2, tables=tables)
    return files


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """All places in a tree: what they are in, and their name or number there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        found.append((value, key))
        if isinstance(item, dict | list):
            places(item, found)
    return found


def changed(tree: Any, generator: random.Random) -> Any:
    """A tree of JSON with one to three things changed."""
    tree = copy.deepcopy(tree)
    for _ in range(generator.randrange(1, 4)):
        found = places(tree, [])
        if not found:
            break
        inside, key = generator.choice(found)
        what = generator.randrange(5)
        other, at = generator.choice(found)
        if what == 0 and isinstance(inside, dict):
            inside[generator.choice(["", "x", "name", "$tensor"])] = inside.pop(key)
        elif what == 1 and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        elif what == 2:
            del inside[key]
        elif what == 3:
            inside[key] = copy.deepcopy(other[at])
        else:
            inside[key] = copy.deepcopy(generator.choice(POOL))
    return tree


def sealed(fields: dict[str, Any]) -> bytes:
    fields.pop("crc32c", None)
    lines = [f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in fields.items()]
    body = ("{\n" + "".join(lines)).encode()
    return body + b'"crc32c": "%08x"\n}\n' % _core.crc32c(body)


def replace(files: ModelFiles, name: str, contents: bytes) -> None:
    path = FOLDER / name
    if files.size(path) is not None:
        files.unlink(path)
    file = files.create(path)
    files.write(file, contents)
    files.close(file)


def use_all(files: ModelFiles) -> bool:
    """Does with a snapshot all that can be done; tells whether it was whole."""
    try:
        snapshot = Snapshot(FOLDER, files)
        manifest = snapshot.manifest
        whole = snapshot.verify() == []
    except SnapshotError:
        return False
    uses = [lambda rank=one.rank: snapshot.trainer(rank) for one in manifest.trainers]
    for table in manifest.tables:
        uses.append(lambda name=table.name: snapshot.rows(name, [0, 3, 2**62]))
        uses.append(lambda name=table.name: snapshot.load_plan(name, 1, 3))
    for dense in manifest.dense:
        uses.append(lambda name=dense.name: snapshot.dense(name))
        uses.append(lambda name=dense.name: snapshot.dense_state(name))
    uses.append(lambda: compare(snapshot, snapshot))
    for use in uses:
        try:
            use()
        except SnapshotError:
            assert not whole
    return whole


def test_manifests(small: ModelFiles) -> None:
    generator = random.Random(1)
    fields = json.loads(small.read(FOLDER / names.MANIFEST))
    files = small.settled()
    assert use_all(files)
    read = 0
    for _ in range(ROUNDS):
        replace(files, names.MANIFEST, sealed(changed(fields, generator)))
        try:
            Directory(PATH, files).manifest(NAME)
        except SnapshotError:
            continue
        read += 1
        use_all(files)
    assert ROUNDS // 100 < read < ROUNDS // 2


def resealed(files: ModelFiles, manifest: Manifest, name: str, contents: bytes) -> None:
    """Puts a file in the place of another, and its checksums into the manifest."""
    replace(files, name, contents)
    listed = tuple(
        entry(name, contents, one.table, one.rows) if one.name == name else one
        for one in manifest.files
    )
    trainers = tuple(
        dataclasses.replace(one, bytes=len(contents), crc32c=_core.crc32c(contents))
        if one.file == name
        else one
        for one in manifest.trainers
    )
    after = dataclasses.replace(manifest, files=listed, trainers=trainers)
    replace(files, names.MANIFEST, after.to_json())


@pytest.mark.parametrize(
    "name", ["s000-t000-0000.safetensors", "s000-dense.safetensors"]
)
def test_headers(small: ModelFiles, name: str) -> None:
    generator = random.Random(2)
    files = small.settled()
    manifest = Snapshot(FOLDER, files).manifest
    whole = small.read(FOLDER / name)
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    for _ in range(ROUNDS // 5):
        text = json.dumps(changed(header, generator)).encode()
        contents = struct.pack("<Q", len(text)) + text + whole[8 + length :]
        resealed(files, manifest, name, contents)
        use_all(files)


@pytest.mark.parametrize("name", ["s000-t000-0000.safetensors"])
def test_values(small: ModelFiles, name: str) -> None:
    generator = random.Random(3)
    files = small.settled()
    manifest = Snapshot(FOLDER, files).manifest
    whole = small.read(FOLDER / name)
    found = 0
    for _ in range(ROUNDS // 5):
        contents = bytearray(whole)
        at = generator.randrange(len(contents) - 16500, len(contents))
        contents[at] ^= 1 << generator.randrange(8)
        resealed(files, manifest, name, bytes(contents))
        found += not use_all(files)
    assert found > ROUNDS // 10  # most are of keys and of where buckets begin


def test_states_of_trainers(small: ModelFiles) -> None:
    generator = random.Random(4)
    files = small.settled()
    manifest = Snapshot(FOLDER, files).manifest
    tree = json.loads(small.read(FOLDER / "trainer-000.json"))
    for _ in range(ROUNDS):
        contents = json.dumps(changed(tree, generator)).encode()
        trainer = dataclasses.replace(
            manifest.trainers[0], bytes=len(contents), crc32c=_core.crc32c(contents)
        )
        replace(files, "trainer-000.json", contents)
        with contextlib.suppress(SnapshotError):
            read_trainer(FOLDER, trainer, files)


def test_a_parameter_as_large_as_is_claimed_takes_no_memory(small) -> None:
    files = small.settled()
    manifest = Snapshot(FOLDER, files).manifest
    first, last = manifest.dense[0].blocks
    for size in (2**40, 2**52):
        claimed = dataclasses.replace(
            manifest.dense[0],
            shape=(size + 8, 1),
            row_width=1,
            blocks=(first, dataclasses.replace(last, elements=size)),
        )
        after = dataclasses.replace(manifest, dense=(claimed, manifest.dense[1]))
        replace(files, names.MANIFEST, after.to_json())
        snapshot = Snapshot(FOLDER, files)
        for use in (snapshot.dense, snapshot.dense_state, snapshot.dense_average):
            with pytest.raises(SnapshotCorruptError, match="expected F32"):
                use("top.weight")
