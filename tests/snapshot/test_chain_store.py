# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Object stores have, and give back, what snapshots of changes are put over."""

from __future__ import annotations

import secrets

import pytest
from small_chains import NAMES, TABLE, write_chain
from small_snapshots import commit

from torch_cpudist.errors import SnapshotError
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.store import Store

pytest.importorskip("fsspec", reason="the extra fsspec is not installed")
SMALL = {"servers": 1, "trainers": 1}


@pytest.fixture
def store() -> Store:
    return Store(f"memory://{secrets.token_hex(8)}/jobs")


@pytest.fixture
def here(tmp_path) -> Directory:
    found = Directory(tmp_path / "here")
    write_chain(found, **SMALL)
    return found


def test_a_chain_goes_there_and_comes_back(store, here, tmp_path) -> None:
    store.put(here, NAMES[2])  # those before could not be copied
    found = store.committed()
    assert [one.name for one in found] == list(reversed(NAMES))
    assert [len(one.members) for one in found] == [3, 2, 1]
    there = Directory(tmp_path / "there")
    assert store.get_newest(there, 0) == NAMES[2]
    assert there.names() == list(NAMES)
    assert Snapshot(there.folder(NAMES[2])).verify() == []
    assert store.get_newest(there, 0) is None


def test_what_is_here_is_not_copied_again(store, here, tmp_path) -> None:
    store.put(here, NAMES[2])
    there = Directory(tmp_path / "there")
    store.get(there, NAMES[0])
    manifest = there.folder(NAMES[0]) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    store.get(there, NAMES[2])
    assert manifest.stat().st_mtime_ns == before
    assert Snapshot(there.folder(NAMES[2])).verify() == []


def test_keep_leaves_there_what_chains_need(store, here) -> None:
    store.put(here, NAMES[2])
    assert store.keep(1) == []
    commit(here, "snap-000000000020-5f3a", number=20, tables={TABLE: [1]}, **SMALL)
    store.put(here, "snap-000000000020-5f3a")
    assert store.keep(1) == list(reversed(NAMES))
    assert [one.name for one in store.committed()] == ["snap-000000000020-5f3a"]


def test_a_chain_that_is_broken_there_is_passed_over(store, here, tmp_path) -> None:
    store.put(here, NAMES[2])
    store.system.rm_file(f"{store.root}/{NAMES[1]}/manifest.json")
    assert [one.name for one in store.committed() if one.damage] == [NAMES[2]]
    there = Directory(tmp_path / "there")
    assert store.get_newest(there, 0) == NAMES[0]
    with pytest.raises(SnapshotError, match="it is not in memory://"):
        store.get(there, NAMES[2])
    assert there.names() == [NAMES[0]]
