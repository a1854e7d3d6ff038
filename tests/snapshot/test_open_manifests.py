# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What manifests say of tables of any key."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from small_snapshots import NAME, commit, table, write

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.settings.admission import CountFilter, Probability
from torch_cpudist.settings.eviction import Evict
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.snapshot.choice import Choice, Target
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.sealed import seal
from torch_cpudist.snapshot.tools.commands import main
from torch_cpudist.snapshot.tools.compacting import compact
from torch_cpudist.snapshot.whole import table_values

KEYS = (-5, -1, 0, 3, 2**62, 2**63 - 1, -(2**63))
TOLD = [
    OpenTable(),
    OpenTable("zeros", 2**60),
    OpenTable(admission=CountFilter(15, 64)),
    OpenTable(admission=Probability(0.25), eviction=Evict(unseen_steps=2**30)),
    OpenTable(eviction=Evict(unseen_s=0.5, min_count=3)),
    OpenTable(eviction=Evict(max_rows=7, order="lfu")),
]


@pytest.fixture
def directory(tmp_path) -> Directory:
    return Directory(tmp_path)


def fields_of(manifest: Manifest) -> dict:
    found = json.loads(manifest.to_json())
    found.pop("crc32c")
    return found


@pytest.mark.parametrize("told", TOLD)
def test_what_a_table_was_told_is_read_back(directory, told) -> None:
    made = write(directory, tables={"a": KEYS, "b": KEYS}, opened=told)
    found = Manifest.from_json(made.to_json())
    assert [table.open for table in found.tables] == [told, told]
    assert found.tables == made.tables
    assert fields_of(made)["format"] == 3


def test_one_open_table_gives_all_the_format(directory) -> None:
    made = write(directory, tables={"a": KEYS, "b": (1, 2)}, opened=OpenTable())
    first, second = made.tables
    mixed = replace(made, tables=(first, replace(second, rows=9, open=None)))
    assert Manifest.from_json(mixed.to_json()).tables == mixed.tables
    fields = fields_of(mixed)
    assert [table["open"] is None for table in fields["tables"]] == [False, True]
    assert "base" not in fields
    for wrong in (None, {}, "snap"):
        with pytest.raises(SnapshotCorruptError, match=r"manifest\.base"):
            Manifest.from_json(seal({**fields, "base": wrong}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"unknown": "nan"}, "unknown must be"),
        ({"max_rows": "0"}, "max_rows must be"),
        ({"max_rows": 5}, "decimal number as text"),
        ({"admission": {"kind": "count", "n": 16, "sketch_bytes": "64"}}, "1 to 15"),
        ({"admission": {"kind": "all"}}, "is not like"),
        ({"admission": {"kind": "probability", "p": 0.0}}, "> 0"),
        ({"eviction": {"order": "lru"}}, "unseen_steps: is missing"),
        ({"more": 1}, "unknown fields"),
    ],
)
def test_what_no_table_is_told_is_damage(directory, changed, said) -> None:
    made = write(directory, tables={"a": KEYS}, opened=OpenTable())
    fields = fields_of(made)
    fields["tables"][0]["open"] |= changed
    with pytest.raises(SnapshotCorruptError, match=said):
        Manifest.from_json(seal(fields))


def test_an_open_table_is_remote(directory) -> None:
    fields = fields_of(write(directory, tables={"a": KEYS}, opened=OpenTable()))
    fields["tables"][0]["remote"] = False
    with pytest.raises(SnapshotCorruptError, match="is open, and not remote"):
        Manifest.from_json(seal(fields))


@pytest.mark.parametrize("servers", [1, 3])
def test_any_key_is_found_and_verified(directory, servers, capsys) -> None:
    commit(directory, tables={"a": KEYS}, opened=OpenTable(), servers=servers)
    snapshot = Snapshot(directory.folder(NAME))
    assert snapshot.verify() == []
    rows = snapshot.rows("a", [*KEYS, 4])
    assert rows.found.tolist() == [True] * len(KEYS) + [False]
    assert main(["verify", str(directory.path)]) == 0
    assert main(["rows", str(directory.path), "a", "-5", str(2**63 - 1)]) == 0
    assert "-5" in capsys.readouterr().out
    with pytest.raises(SnapshotError, match="any int64 is a key"):
        table_values(snapshot, "a")


def test_keys_of_other_tables_stay_in_their_range(directory) -> None:
    commit(directory, tables={"a": (-1, 4)})
    (error,) = Snapshot(directory.folder(NAME)).verify()
    assert "keys outside of 0 to" in str(error)


def test_keys_that_went_may_be_any(directory) -> None:
    how = {"opened": OpenTable(), "servers": 2}
    base = commit(directory, tables={"a": KEYS}, **how)
    name = "snap-000000000013-5f3a"
    gone = {"a": (-5, -(2**63), 77)}
    changes = {"tables": {"a": (9, -9)}, "gone": gone, "base": base}
    # Other rules than before do not break the chain.
    how["opened"] = OpenTable("zeros", admission=CountFilter(2))
    commit(directory, name, number=13, **changes, **how)
    snapshot = Snapshot(directory.folder(name))
    assert snapshot.verify() == []
    asked = np.array([-5, -(2**63), -1, 9, -9])
    expected = [False, False, True, True, True]
    assert snapshot.rows("a", asked).found.tolist() == expected
    made = compact(directory, name)
    assert made.tables[0].open == how["opened"]
    whole = Snapshot(directory.folder(made.name))
    assert whole.rows("a", asked).found.tolist() == expected
    assert whole.verify() == []


def plan(directory, opened: OpenTable | None, target: Target):
    manifest = commit(directory, tables={"a": (1, 2)}, opened=opened)
    return Choice().plan(manifest, [target])


def target(rows: int, opened: bool) -> Target:
    return Target("a", True, (rows, 4), table().state, "adagrad", open=opened)


def test_any_table_becomes_one_of_any_key(directory) -> None:
    found = plan(directory, None, target(2**20, True))
    assert found.taken["a"].state
    assert "not in it" not in found.taken["a"].line()


def test_a_table_of_any_key_becomes_no_other(directory) -> None:
    with pytest.raises(SnapshotError, match="nothing of this model"):
        plan(directory, OpenTable(), target(2**62, False))
    manifest = directory.manifest(NAME)
    with pytest.raises(
        SnapshotError, match="was of any key of 4, is 4611686018427387904 of 4"
    ):
        Choice(("a",)).plan(manifest, [target(2**62, False)])


def test_a_table_of_any_key_goes_on(directory) -> None:
    found = plan(directory, OpenTable(), target(2**54, True))
    assert found.taken["a"].state
    assert found.missing == {}
