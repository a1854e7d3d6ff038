# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of changes are read over what they are put over, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from model_files import ModelFiles
from small_chains import (
    GONE,
    NAMES,
    NEWEST,
    ROWS,
    TABLE,
    commit_member,
    weights_of,
    write_chain,
)
from small_snapshots import commit, write

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.entries import Base
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.merging import merged
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.sealed import seal
from torch_cpudist.snapshot.tools.commands import main
from torch_cpudist.snapshot.tools.compacting import compact
from torch_cpudist.snapshot.tools.comparing import compare
from torch_cpudist.snapshot.whole import table_values

KEYS = np.array(sorted(NEWEST))


@pytest.fixture
def directory(tmp_path) -> Directory:
    found = Directory(tmp_path)
    write_chain(found, servers=2, part_rows=5)
    return found


def newest(directory: Directory) -> Snapshot:
    return Snapshot(directory.folder(NAMES[2]), directory.files)


def test_the_newest_row_of_each_key_counts(directory) -> None:
    snapshot = newest(directory)
    assert [one.manifest.name for one in snapshot.members] == list(reversed(NAMES))
    asked = np.array([*KEYS, 12, 36, 100, 7, 15])
    rows = snapshot.rows(TABLE, asked)
    assert rows.found.tolist() == [True] * len(KEYS) + [False] * 5
    np.testing.assert_array_equal(rows.columns["weight"][:-5], weights_of(KEYS))
    # In the middle of the chain 100 is there and 9 is not.
    before = Snapshot(directory.folder(NAMES[1])).rows(TABLE, [100, 9, 15])
    assert before.found.tolist() == [True, False, True]


def test_runs_of_buckets_are_merged(directory) -> None:
    layers = newest(directory).layers(TABLE)
    salt = names.table_salt(TABLE)
    found: dict[int, np.ndarray] = {}
    for run in merged(layers, salt, ("weight",), rows_at_once=3):
        found.update(zip(run.keys.tolist(), run.columns["weight"], strict=True))
    assert sorted(found) == KEYS.tolist()
    for key, weight in found.items():
        np.testing.assert_array_equal(weight, weights_of(np.array([key]))[0])


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_servers_load_the_newest_rows_over_older_ones(directory, servers) -> None:
    """As they do: in the order of the plan, each row in the place of the one before."""
    loaded: dict[int, np.ndarray] = {}
    snapshot = newest(directory)
    parts = {
        (member.manifest.name, part.file.name): part
        for member in snapshot.members
        for part in member.parts(TABLE)
    }
    for server in range(servers):
        for run in snapshot.load_plan(TABLE, server, servers):
            part = parts[run.snapshot, run.file]
            keys = part.column("keys", run.row_begin, run.row_end)
            weight = part.column("weight", run.row_begin, run.row_end)
            loaded.update(zip(keys.tolist(), weight, strict=True))
    assert sorted(loaded) == KEYS.tolist()
    found = np.array([loaded[int(key)] for key in KEYS])
    np.testing.assert_array_equal(found, weights_of(KEYS))


@pytest.mark.parametrize("part_bytes", [200, 32 << 20])
def test_a_chain_is_put_together(directory, part_bytes) -> None:
    chain = newest(directory)
    made = compact(directory, NAMES[2], part_bytes)
    assert made.name == NAMES[2] + "-full"
    assert made.base is None
    whole = Snapshot(directory.folder(made.name))
    assert whole.verify() == []
    assert len(whole.members) == 1
    assert all(one.equal for one in compare(chain, whole))
    assert sum(file.rows for file in made.files) == len(KEYS)
    assert whole.manifest.commit == chain.manifest.commit
    for rank in (0, 1):
        assert whole.trainer(rank)["rank"] == rank
    # It is what a run goes on from, and stands for the moment of its chain.
    assert directory.newest() == made.name
    assert directory.keep(1) == [NAMES[2], NAMES[1], NAMES[0]]
    assert directory.names() == [made.name]


def test_what_cannot_be_put_together(directory) -> None:
    with pytest.raises(SnapshotError, match="has all rows already"):
        compact(directory, NAMES[0])
    compact(directory, NAMES[2])
    with pytest.raises(SnapshotError, match="none is ever overwritten"):
        compact(directory, NAMES[2])
    compact(directory, NAMES[1])
    # Of an older moment, it is not the newest.
    assert directory.newest() == NAMES[2] + "-full"
    file = next(directory.folder(NAMES[0]).glob("s001-t000-*"))
    contents = bytearray(file.read_bytes())
    contents[-50] ^= 1
    file.write_bytes(contents)
    for name in (NAMES[1], NAMES[2]):
        directory.remove(name + "-full")
        with pytest.raises(SnapshotCorruptError, match=file.name):
            compact(directory, name)
        assert name + "-full" not in directory.names()


def test_the_commands_know_chains(directory, capsys) -> None:
    path = str(directory.path)
    assert main(["list", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(reversed(NAMES))
    assert lines[0].endswith(f"on {NAMES[1]}")
    assert main(["verify", path]) == 0
    assert main(["rows", path, TABLE, "9"]) == 0
    assert main(["rows", path, TABLE, "12"]) == 1
    assert main(["compact", path]) == 0
    assert main(["diff", f"{path}/{NAMES[2]}", f"{path}/{NAMES[2]}-full"]) == 0
    assert main(["diff", f"{path}/{NAMES[1]}", f"{path}/{NAMES[2]}"]) == 1
    capsys.readouterr()
    (directory.folder(NAMES[0]) / "manifest.json").unlink()
    assert main(["list", "--json", path]) == 1
    listed = json.loads(capsys.readouterr().out)["snapshots"]
    damaged = {one["name"] for one in listed if "damaged" in one}
    assert damaged == {NAMES[1], NAMES[2]}
    assert main(["verify", path]) == 1
    assert f"put over {NAMES[0]}" in capsys.readouterr().out


def test_verify_names_the_member_that_is_damaged(directory, capsys) -> None:
    file = next(directory.folder(NAMES[1]).glob("s*-gone.safetensors"))
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    assert main(["verify", "--json", str(directory.path)]) == 1
    found = json.loads(capsys.readouterr().out)["snapshots"]
    damaged = {one["name"]: one["damaged"] for one in found if one["damaged"]}
    assert damaged.keys() == {NAMES[1], NAMES[2]}
    for one in damaged.values():
        assert one[0]["file"] == file.name
        assert NAMES[1] in one[0]["message"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_base_that_is_gone_is_named(directory, number) -> None:
    directory.remove(NAMES[number])
    with pytest.raises(SnapshotCorruptError) as raised:
        newest(directory)
    assert raised.value.file == f"{NAMES[number]}/manifest.json"
    assert NAMES[2] in str(raised.value)
    found = {one.name: one for one in directory.committed()}
    assert isinstance(found[NAMES[2]].damage, SnapshotCorruptError)
    assert directory.newest() == (NAMES[0] if number == 1 else None)


def test_another_snapshot_of_the_name_is_not_taken(directory) -> None:
    directory.remove(NAMES[0])
    commit(directory, NAMES[0], servers=2)
    with pytest.raises(SnapshotCorruptError, match="of another snapshot of that name"):
        newest(directory)


def test_a_base_must_be_there_and_fit_when_it_is_committed(tmp_path) -> None:
    directory = Directory(tmp_path)
    (first,) = write_chain(directory, 1)
    cases = [
        (Base("other", 1), {}, "cannot be read"),
        (Base(first.name, first.crc32c ^ 1), {}, "of another snapshot of that name"),
        (None, {"param_set": 1}, "is of optimizer 0, expected 1"),
        (None, {"number": 12}, "is not older"),
        (None, {"average_decay": 0.25}, "has averages of decay 0.5"),
        (None, {"tables": ()}, "has other tables"),
    ]
    for base, changes, message in cases:
        made = write(directory, NAMES[1], number=13, base=first)
        wrong = dataclasses.replace(made, base=base or made.base, **changes)
        if "tables" in changes:
            dense = tuple(one for one in made.files if one.table is None)
            wrong = dataclasses.replace(wrong, files=dense)
        with pytest.raises(SnapshotCorruptError, match=message):
            directory.commit(wrong)
        assert directory.names() == [NAMES[0]]
    # The rate of its rule may be another one.
    (table,) = made.tables
    rule = dataclasses.replace(table.rule, options={"lr": 7.0})
    tables = (dataclasses.replace(table, rule=rule, step=99),)
    directory.commit(dataclasses.replace(made, tables=tables))
    assert Snapshot(directory.folder(NAMES[1])).verify() == []


def test_manifests_of_changes_have_a_format_of_their_own(directory) -> None:
    texts = [(directory.folder(n) / "manifest.json").read_text() for n in NAMES]
    assert [json.loads(text)["format"] for text in texts] == [1, 2, 2]
    assert "base" not in json.loads(texts[0])
    fields = json.loads(texts[1])
    assert fields["base"] == {
        "name": NAMES[0],
        "crc32c": json.loads(texts[0])["crc32c"],
    }
    fields.pop("crc32c")
    for base in ({}, {"name": "../a", "crc32c": "00000000"}, {"name": "a"}, None, 1):
        with pytest.raises(SnapshotCorruptError, match=r"manifest\.base"):
            Manifest.from_json(seal({**fields, "base": base}))
    # All rows are there: none has gone.
    fields["format"] = 1
    del fields["base"]
    with pytest.raises(SnapshotCorruptError, match="and all rows are here"):
        Manifest.from_json(seal(fields))


def test_every_change_of_what_binds_a_chain_is_found() -> None:
    files = ModelFiles()
    directory = Directory(Path("/chains"), files)
    write_chain(directory, servers=1, trainers=1)
    tried = 0
    for name in NAMES:
        folder = directory.folder(name)
        for file in files.list(folder):
            whole = files.read(folder / file)
            small = file == "manifest.json" or "-gone" in file
            for at in range(0, len(whole), 1 if small else 211):
                changed = bytearray(whole)
                changed[at] ^= 1 << at % 8
                files.unlink(folder / file)
                put(files, folder / file, bytes(changed))
                error = first_error(directory)
                assert error is not None, (name, file, at)
                assert isinstance(error, SnapshotCorruptError)
                assert name in str(error)
                assert error.file in (file, f"{name}/{file}")
                tried += 1
            put(files, folder / file, whole)
    assert first_error(directory) is None
    assert tried > 5000


def put(files: ModelFiles, path: Path, contents: bytes) -> None:
    file = files.create(path)
    files.write(file, contents)
    files.close(file)


def first_error(directory: Directory) -> SnapshotError | None:
    try:
        found = newest(directory).verify()
    except SnapshotError as error:
        return error
    return found[0] if found else None


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ({TABLE: (6, 12)}, "has a row of key 6, which has gone"),
        ({TABLE: (12, 2**45)}, "keys outside of 0 to"),
    ],
)
def test_keys_that_cannot_have_gone(tmp_path, gone, message) -> None:
    directory = Directory(tmp_path)
    (first,) = write_chain(directory, 1)
    commit_member(directory, 1, first, gone=gone)
    errors = Snapshot(directory.folder(NAMES[1])).verify()
    assert len(errors) == 1
    assert message in str(errors[0])


def test_keep_counts_what_can_be_read_and_leaves_what_it_needs(tmp_path) -> None:
    directory = Directory(tmp_path)
    chain = write_chain(directory)
    later = {"number": 20, "tables": {TABLE: [1]}}
    whole = commit(directory, "snap-000000000020-5f3a", **later)
    assert directory.keep(2) == []
    last = commit(
        directory, "snap-000000000021-5f3a", base=whole, **{**later, "number": 21}
    )
    # The two newest need nothing of the chain, which goes from its end.
    assert directory.keep(2) == [one.name for one in reversed(chain)]
    assert directory.names() == [whole.name, last.name]
    assert directory.keep(1) == []
    # What cannot be read does not count, and goes if it is older than what stays.
    (directory.folder(whole.name) / "manifest.json").unlink()
    commit(directory, "snap-000000000030-5f3a", number=30, tables={TABLE: [1]})
    assert directory.keep(2) == []
    commit(directory, "snap-000000000031-5f3a", number=31, tables={TABLE: [1]})
    assert directory.keep(2) == [last.name]


def test_the_made_up_chain_is_of_all_kinds() -> None:
    assert set(ROWS[1]) & set(ROWS[0])
    assert set(ROWS[1]) & set(GONE[2])
    assert set(ROWS[2]) & set(GONE[1])


@pytest.mark.parametrize("changed", [(1,), (1, 2)])
def test_a_table_in_memory_is_all_rows_of_the_chain(tmp_path, changed) -> None:
    directory = Directory(tmp_path)
    first = commit(directory, NAMES[0], number=12, tables={TABLE: (0, 1, 3)})
    commit(
        directory,
        NAMES[1],
        number=13,
        tables={TABLE: changed},
        more=1000.0,
        base=first,
    )
    snapshot = Snapshot(directory.folder(NAMES[1]), directory.files)
    (table, *others) = snapshot.manifest.tables
    static = dataclasses.replace(table, remote=False, rows=4)
    snapshot.manifest = dataclasses.replace(snapshot.manifest, tables=(static, *others))
    if 2 not in changed:
        with pytest.raises(SnapshotCorruptError, match=r"has 3 rows .* all 4"):
            table_values(snapshot, TABLE)
        return
    found = table_values(snapshot, TABLE)
    assert (found[[0, 3]] < 1000).all()
    assert (found[[1, 2]] > 1000).all()
