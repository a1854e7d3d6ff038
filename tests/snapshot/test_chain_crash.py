# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A crash or an error at any call of what is done to chains: all of one, or none."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import Crash, ModelFiles
from small_chains import GONE, NAMES, ROWS, TABLE, commit_member, write_chain
from small_snapshots import commit, row_values

from torch_cpudist.errors import SnapshotError
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.merging import merged
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.tools.compacting import compact

PATH = Path("/chains")
SMALL = {"servers": 1, "trainers": 1, "average": False}
FULL = NAMES[2] + "-full"
NEXT = "snap-000000000020-5f3a"
ON_NEXT = "snap-000000000021-5f3a"


def rows_by_key(name: str) -> dict[int, int]:
    """Which member the row of each key of a snapshot is of."""
    if name in (NEXT, ON_NEXT):
        return {1: 0, 2: 3} if name == ON_NEXT else {1: 0}
    last = 2 if name == FULL else NAMES.index(name)
    found: dict[int, int] = {}
    for member in range(last + 1):
        for key in GONE[member]:
            found.pop(key, None)
        found |= dict.fromkeys(ROWS[member], member)
    return found


def begun(length: int) -> ModelFiles:
    """A disk with the beginning of a chain."""
    files = ModelFiles()
    write_chain(Directory(PATH, files), length, **SMALL)
    return files.settled()


def save_delta(directory: Directory) -> None:
    directory.sweep()
    commit_member(directory, 2, directory.manifest(NAMES[1]), **SMALL)
    directory.keep(1)


def put_together(directory: Directory) -> None:
    compact(directory, NAMES[2])
    directory.keep(1)


def begin_anew(directory: Directory) -> None:
    """One of all rows, after which the chain goes, and one that is put over it."""
    directory.sweep()
    how = {"tables": {TABLE: [1]}, **SMALL}
    whole = commit(directory, NEXT, number=20, **how)
    directory.keep(1)
    how["tables"] = {TABLE: [2]}
    commit(directory, ON_NEXT, number=21, base=whole, more=3000.0, **how)
    directory.keep(1)


# What is done, what is there before, and at its end.
DONE: dict[str, tuple[Callable[[Directory], None], int, set[str]]] = {
    "save a delta": (save_delta, 2, set(NAMES)),
    "compact": (put_together, 3, {FULL}),
    "begin anew": (begin_anew, 3, {NEXT, ON_NEXT}),
}


def check(files: ModelFiles) -> str:
    """Checks that whatever is there is what it was; returns the newest."""
    directory = Directory(PATH, files)
    for found in directory.committed():
        assert found.damage is None, found
        snapshot = Snapshot(directory.folder(found.name), files)
        assert snapshot.verify() == []
        salt = snapshot.manifest.tables[0].salt
        (run,) = merged(snapshot.layers(TABLE), salt)
        expected = rows_by_key(found.name)
        assert sorted(run.keys.tolist()) == sorted(expected)
        for key, weight in zip(run.keys, run.columns["weight"], strict=True):
            of = row_values(run.keys[run.keys == key], 4, 0.5)[0]
            assert (weight == of + 1000 * expected[int(key)]).all()
    newest = directory.newest()
    assert newest is not None
    return newest


def stopping(count: int, error: BaseException, reads: bool):
    """Raises at one call, and at all after it if the program has crashed."""
    calls = {"made": 0}

    def before(name: str, changes: bool) -> None:
        if changes or reads:
            calls["made"] += 1
            crashed = isinstance(error, Crash) and calls["made"] > count
            if calls["made"] == count or crashed:
                raise error

    return before, calls


@pytest.mark.parametrize("what", DONE)
def test_a_crash_at_every_call(what: str) -> None:
    do, length, at_end = DONE[what]
    start = begun(length)
    before = check(start)
    points, newest = 0, set()
    while True:
        files = start.settled()
        files.before, _ = stopping(points + 1, Crash(), reads=False)
        try:
            do(Directory(PATH, files))
        except Crash:
            points += 1
        else:
            break
        for kept in (0, 1):
            left = files.after_crash(lambda options, kept=kept: options[kept])
            newest.add(check(left))
            # The run that comes back ends where it would have ended.
            again = Directory(PATH, left)
            again.sweep()
            if again.newest() == before:
                do(again)
            elif again.newest() == NEXT:
                how = {"tables": {TABLE: [2]}, "more": 3000.0, "number": 21, **SMALL}
                commit(again, ON_NEXT, base=again.manifest(NEXT), **how)
            again.keep(1)
            assert set(again.names()) == at_end
            assert again.uncommitted() == []
            check(left)
    assert check(files) in at_end
    assert set(Directory(PATH, files).names()) == at_end
    assert points > 30
    assert len(newest) >= 2


@pytest.mark.parametrize("what", DONE)
def test_an_error_of_every_call(what: str) -> None:
    do, length, at_end = DONE[what]
    start = begun(length)
    points, refused = 0, 0
    while True:
        files = start.settled()
        full = OSError(errno.ENOSPC, "No space left on device")
        files.before, calls = stopping(points + 1, full, reads=True)
        try:
            do(Directory(PATH, files))
        except SnapshotError:
            refused += 1
        files.before = lambda name, changes: None
        if calls["made"] <= points:
            break
        points += 1
        check(files)
    assert set(Directory(PATH, files).names()) == at_end
    assert points > refused > points // 2
