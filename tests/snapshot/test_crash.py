# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A crash or an error at any call: old snapshots or the new one, never a mixture."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from model_files import Crash, ModelFiles
from small_snapshots import commit, row_values

from torch_cpudist.errors import SnapshotError
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

PATH = Path("/snapshots")
OLD = ("snap-000000000010-aaaa", "snap-000000000020-aaaa")
# What runs that were killed have begun: of an older moment, and beyond the newest.
LEFT = ("snap-000000000015-bbbb", "snap-000000000040-bbbb")
NEW = "snap-000000000030-aaaa"
NAMED = "best"
SMALL = {"servers": 2, "trainers": 1, "average": False}
# Keys of each snapshot are its own, so that a part of another would be seen.
KEYS = {OLD[0]: [1, 4], OLD[1]: [2, 5, 8], NEW: [3, 6, 9, 12], NAMED: [7]}


def commit_one(
    directory: Directory, name: str, number: int, prepare: bool = True
) -> None:
    how = {"tables": {"users.weight": KEYS[name]}, "prepare": prepare}
    commit(directory, name, number=number, **how, **SMALL)


@pytest.fixture(scope="module")
def before() -> ModelFiles:
    """What is on the disk when the save begins."""
    files = ModelFiles()
    directory = Directory(PATH, files)
    commit_one(directory, OLD[0], 10)
    commit_one(directory, NAMED, 11)
    commit_one(directory, OLD[1], 20)
    for name in LEFT:
        folder = directory.prepare(name)
        files.close(files.create(folder / "s000-t000-0000.safetensors"))
    return files.settled()


def save(directory: Directory, prepare: bool = True) -> None:
    """What trainer 0 and the others do for one save, and at resume."""
    directory.sweep()
    commit_one(directory, NEW, 30, prepare)
    directory.keep(2)


def check_whole(files: ModelFiles) -> None:
    """Checks that every snapshot that is there is what it was, all of it."""
    directory = Directory(PATH, files)
    for found in directory.committed():
        assert found.damage is None, found
        snapshot = Snapshot(directory.folder(found.name), files)
        assert snapshot.verify() == []
        kept = []
        for part in snapshot.parts("users.weight"):
            keys = part.column("keys")
            assert (part.column("weight") == row_values(keys, 4, 0.5)).all()
            kept += keys.tolist()
        assert sorted(kept) == KEYS[found.name]


def check(files: ModelFiles) -> str:
    """Checks also which snapshots are there; returns the newest."""
    check_whole(files)
    directory = Directory(PATH, files)
    there = directory.names()
    assert NAMED in there
    newest = directory.newest()
    assert newest in (OLD[1], NEW)
    # The one before goes only when the new one is there.
    assert OLD[1] in there
    assert OLD[0] in there or NEW in there
    return newest


def stopping(count: int, error: BaseException, reads: bool):
    """Raises at one call, and at all after it if the program has crashed."""
    calls = {"made": 0, "kind": ""}

    def before(name: str, changes: bool) -> None:
        if changes or reads:
            calls["made"] += 1
            if calls["made"] == count:
                calls["kind"] = name
            crashed = isinstance(error, Crash) and calls["made"] > count
            if calls["made"] == count or crashed:
                raise error

    return before, calls


def calls_of(before: ModelFiles, reads: bool, prepare: bool = True) -> int:
    files = before.settled()
    files.before, calls = stopping(-1, OSError(), reads)
    save(Directory(PATH, files), prepare)
    return calls["made"]


@pytest.mark.parametrize("prepare", [True, False])
def test_all_goes_well(before: ModelFiles, prepare: bool) -> None:
    files = before.settled()
    save(Directory(PATH, files), prepare)
    for left in (files, files.after_crash(lambda options: options[1])):
        assert check(left) == NEW
        assert Directory(PATH, left).names() == [NAMED, OLD[1], NEW]
        assert Directory(PATH, left).uncommitted() == []


@pytest.mark.parametrize("prepare", [True, False])
def test_a_crash_at_every_call(before: ModelFiles, prepare: bool) -> None:
    generator = random.Random(5)
    choices = [
        lambda options: options[0],
        lambda options: options[1],
        generator.choice,
    ]
    newest = set()
    total = calls_of(before, reads=False, prepare=prepare)
    assert total > 50
    for count in range(1, total + 1):
        files = before.settled()
        files.before, _ = stopping(count, Crash(), reads=False)
        with pytest.raises(Crash):
            save(Directory(PATH, files), prepare)
        for choose in choices:
            left = files.after_crash(choose)
            newest.add(check(left))
            again = Directory(PATH, left)
            if NEW not in again.names():
                save(again)  # the run that resumes, with the same name
            else:
                again.sweep()
                again.keep(2)
            assert again.newest() == NEW
            assert again.names() == [NAMED, OLD[1], NEW]
            assert again.uncommitted() == []
    assert newest == {OLD[1], NEW}


def test_an_error_of_every_call(before: ModelFiles) -> None:
    total = calls_of(before, reads=True)
    assert total > 100
    refused = 0
    for count in range(1, total + 1):
        files = before.settled()
        full = OSError(errno.ENOSPC, "No space left on device")
        files.before, calls = stopping(count, full, reads=True)
        said = refusal(Directory(PATH, files))
        assert calls["made"] >= count
        # An older snapshot that cannot be read does not keep a new one from coming.
        assert "No space left on device" in said or calls["kind"] in ("read", "size")
        refused += bool(said)
        files.before = lambda name, changes: None
        check(files)
        again = Directory(PATH, files)
        if NEW not in again.names():
            save(again)
        assert again.newest() == NEW
    assert total > refused > total * 3 // 4


def refusal(directory: Directory) -> str:
    """What a save that fails says."""
    try:
        save(directory)
    except SnapshotError as error:
        return str(error)
    return ""


def test_every_prefix_of_a_removal_can_be_swept(before: ModelFiles) -> None:
    total = 0
    while True:
        files = before.settled()
        total += 1
        files.before, _ = stopping(total, Crash(), reads=False)
        try:
            Directory(PATH, files).remove(OLD[0])
        except Crash:
            left = files.after_crash(lambda options: options[0])
            directory = Directory(PATH, left)
            check_whole(left)
            directory.sweep()
            assert directory.uncommitted() == []
            continue
        break
    assert total > 5
