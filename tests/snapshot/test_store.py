# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots in an object store: copied there and back, whole or not at all."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
from small_snapshots import commit

from torch_cpudist import _core
from torch_cpudist.errors import (
    ConfigurationError,
    SnapshotCorruptError,
    SnapshotError,
)
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.store import Store

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")

SMALL = {"servers": 2, "trainers": 1}


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    """An empty store, in memory or in a directory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    url = "memory://bucket/prefix"
    if request.param == "file":
        url = f"file://{tmp_path}/bucket/prefix"
    yield Store(url + "/")
    system.store.clear()


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path / "here")


def numbered(number, param_set=0):
    return names.snapshot_name(number, 0xAAAA, param_set)


def emptied(directory):
    shutil.rmtree(directory.path, ignore_errors=True)
    return directory


def objects(store):
    """Everything in it, by what it is called there."""
    system = store.system
    return {
        name.removeprefix(store.root + "/"): bytes(system.cat_file(name))
        for name in system.find(store.root)
    }


def test_there_and_back_every_byte(store, directory):
    commit(directory, numbered(10), number=10, **SMALL)
    folder = directory.folder(numbered(10))
    (folder / "notes.txt").write_text("of others")
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "notes.txt"}
    store.put(directory, numbered(10))
    assert objects(store) == {f"{numbered(10)}/{n}": b for n, b in before.items()}
    store.put(directory, numbered(10))  # it is there already
    emptied(directory)
    store.get(directory, numbered(10))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert Snapshot(folder).verify() == []


def test_the_newest_comes_back_only_if_it_is_newer(store, directory):
    assert store.get_newest(directory, 0) is None
    for number in (10, 20):
        commit(directory, numbered(number), number=number, **SMALL)
        store.put(directory, numbered(number))
    assert store.get_newest(directory, 0) is None
    directory.remove(numbered(20))
    assert store.get_newest(directory, 0) == numbered(20)
    # One that is here and was never copied is newer than what is there.
    commit(directory, numbered(30), number=30, **SMALL)
    assert store.get_newest(directory, 0) is None
    assert store.get_newest(directory, 1) is None
    assert store.get_newest(emptied(directory), 0) == numbered(20)
    assert directory.names() == [numbered(20)]


def test_damaged_ones_are_passed_over(store, directory, caplog):
    for number in (10, 20, 30):
        commit(directory, numbered(number), number=number, **SMALL)
        store.put(directory, numbered(number))
    [part] = [n for n in objects(store) if n.startswith(numbered(30) + "/s001-t000")]
    whole = objects(store)
    changed = bytearray(whole[part])
    changed[-40] ^= 1
    store.system.pipe_file(f"{store.root}/{part}", bytes(changed))
    manifest = f"{store.root}/{numbered(20)}/manifest.json"
    store.system.pipe_file(manifest, whole[f"{numbered(20)}/manifest.json"][:-30])
    emptied(directory)
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        assert store.get_newest(directory, 0) == numbered(10)
    assert part.partition("/")[2] in caplog.text
    assert directory.names() == [numbered(10)]
    assert directory.uncommitted() == []
    store.remove(numbered(10))
    with pytest.raises(SnapshotCorruptError, match=part.partition("/")[2]):
        store.get_newest(emptied(directory), 0)


def test_every_file_is_checked_on_its_way_back(store, directory):
    commit(directory, numbered(10), number=10, **SMALL)
    store.put(directory, numbered(10))
    for name, contents in objects(store).items():
        file = name.partition("/")[2]
        path = f"{store.root}/{name}"
        store.system.rm_file(path)
        told = "no snapshot" if file == "manifest.json" else re.escape(file)
        with pytest.raises(SnapshotError, match=told):
            store.get(emptied(directory), numbered(10))
        for changed in (contents[:-1], contents[:9] + b"!" + contents[10:]):
            store.system.pipe_file(path, changed)
            with pytest.raises(SnapshotCorruptError, match=re.escape(file)):
                store.get(emptied(directory), numbered(10))
            assert directory.names() == []
        store.system.pipe_file(path, contents)
    store.get(emptied(directory), numbered(10))


def test_the_newest_stay_and_named_ones(store, directory):
    for number in (10, 20, 30):
        for param_set in (0, 1):
            name = numbered(number, param_set=param_set)
            manifest = commit(directory, name, number=number, **SMALL)
            changed = dataclasses.replace(manifest, param_set=param_set)
            path = directory.folder(name) / "manifest.json"
            path.write_bytes(changed.to_json())
            store.put(directory, name)
    commit(directory, "mine", number=5, **SMALL)
    store.put(directory, "mine")
    old = [numbered(10, param_set=1), numbered(20, param_set=1)]
    assert store.keep(1, param_set=1) == old
    left = {name.partition("/")[0] for name in objects(store)}
    assert left == {
        *("mine", numbered(10), numbered(20), numbered(30)),
        numbered(30, param_set=1),
    }
    assert [found.name for found in store.committed(1)] == [numbered(30, param_set=1)]


def test_what_copies_that_did_not_end_have_left(store, directory):
    for number in (10, 20, 30):
        commit(directory, numbered(number), number=number, **SMALL)
        store.put(directory, numbered(number))
    for number in (10, 30):
        store.system.rm_file(f"{store.root}/{numbered(number)}/manifest.json")
    store.system.pipe_file(f"{store.root}/{numbered(10)}/notes", b"of others")
    name = f"{store.root}/begun/s000-t000-0000.safetensors"
    store.system.makedirs(f"{store.root}/begun", exist_ok=True)
    store.system.pipe_file(name, b"x")
    # The first optimizer of this run may be writing them.
    assert store.sweep(0x1_0000_AAAA, 1) == []
    assert store.sweep() == [numbered(10), numbered(30)]
    left = {name for name in objects(store) if not name.startswith(numbered(20))}
    assert left == {f"{numbered(10)}/notes", "begun/s000-t000-0000.safetensors"}


def test_none_is_overwritten(store, directory):
    commit(directory, "mine", number=5, **SMALL)
    store.put(directory, "mine")
    emptied(directory)
    commit(directory, "mine", number=6, **SMALL)
    with pytest.raises(SnapshotError, match="none is ever overwritten"):
        store.put(directory, "mine")


def test_what_is_not_there(store, directory):
    assert store.committed() == []
    assert store.manifest("none") is None
    with pytest.raises(SnapshotError, match=r"no snapshot 'none' .* there are none"):
        store.get(directory, "none")
    store.probe()
    assert objects(store) == {}


class Died(BaseException):
    """The process ended here."""


class Dying:
    """A file system that ends the program at one of its calls."""

    def __init__(self, system, at):
        self._system, self._left = system, at

    def __getattr__(self, name):
        method = getattr(self._system, name)
        if name not in ("put_file", "pipe_file", "rm_file", "makedirs"):
            return method

        def counted(*args, **kwargs):
            self._left -= 1
            if self._left == 0:
                if name == "put_file":  # half of it
                    self._system.pipe_file(args[1], Path(args[0]).read_bytes()[:20])
                raise Died
            return method(*args, **kwargs)

        return counted


def test_whatever_ends_a_copy_the_old_or_the_new_one_is_there(directory):
    """At each call of a put and of the removal of what is old."""
    system = fsspec.filesystem("memory")
    for number in (10, 20):
        commit(directory, numbered(number), number=number, **SMALL)
    points = 0
    for at in range(1, 1000):
        system.store.clear()
        store = Store("memory://bucket/prefix")
        store.put(directory, numbered(10))
        store.system = Dying(system, at)
        try:
            store.put(directory, numbered(20))
            store.keep(1)
            ended = False
        except Died:
            points, ended = points + 1, True
        again = Store("memory://bucket/prefix")
        there = [found.name for found in again.committed()]
        assert there in (
            *([numbered(10)], [numbered(20), numbered(10)], [numbered(20)]),
        )
        target = Directory(directory.path.parent / f"at-{at}")
        assert again.get_newest(target, 0) == there[0]
        assert Snapshot(target.folder(there[0])).verify() == []
        again.put(directory, numbered(20))  # the next start goes on
        again.keep(1)
        again.sweep()
        assert {n.partition("/")[0] for n in objects(again)} == {numbered(20)}
        if not ended:
            break
    assert points >= 15
    system.store.clear()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nosuch://bucket", "no driver for nosuch"),
        ("abfs://box/prefix", "no driver for abfs"),
    ],
)
def test_drivers_that_are_not_there(url, told):
    with pytest.raises(ConfigurationError, match=told):
        Store(url)


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigurationError, match="pip install fsspec"):
        Store("s3://bucket/prefix")


class Refusing(memory.MemoryFileSystem):
    """One that nobody may write to."""

    protocol = "refusing"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        raise PermissionError(13, "Access Denied")


def test_a_store_that_refuses():
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with pytest.raises(
        SnapshotError, match=r"cannot write in refusing:.*Access Denied"
    ):
        Store("refusing://bucket/prefix").probe()


def test_a_file_that_goes_while_others_are_copied(store, directory):
    """The commit is of all that is there, and not of what was there."""
    commit(directory, numbered(10), number=10, **SMALL)
    whole = store.system

    class Losing:
        def __getattr__(self, name):
            return getattr(whole, name)

        def put_file(self, source, target):
            whole.put_file(source, target)
            if target.endswith("trainer-000.json"):  # comes behind rows
                whole.rm_file(f"{store.root}/{numbered(10)}/s000-t000-0000.safetensors")

    store.system = Losing()
    with pytest.raises(SnapshotError, match=r"s000-t000-0000.* is not there"):
        store.put(directory, numbered(10))
    store.system = whole
    assert store.committed() == []
    path = directory.folder(numbered(10)) / "s000-t000-0000.safetensors"
    contents = path.read_bytes()
    path.unlink()
    with pytest.raises(SnapshotError, match=r"s000-t000-0000.* is not there"):
        store.put(directory, numbered(10))
    path.write_bytes(contents[:-1])
    with pytest.raises(SnapshotError, match=r"s000-t000-0000.* has "):
        store.put(directory, numbered(10))
    path.write_bytes(contents)
    store.put(directory, numbered(10))
    assert [one.name for one in store.committed()] == [numbered(10)]


def test_those_of_later_formats_are_passed_over(store, directory, caplog):
    for number in (10, 20):
        commit(directory, numbered(number), number=number, **SMALL)
        store.put(directory, numbered(number))
    text = (directory.folder(numbered(20)) / "manifest.json").read_bytes()
    later = text.replace(b'"format": 1', b'"format": 9')[:-23]
    later += f'"crc32c": "{_core.crc32c(later):08x}"\n}}\n'.encode()
    store.system.pipe_file(f"{store.root}/{numbered(20)}/manifest.json", later)
    assert [one.damage is None for one in store.committed()] == [True, False]
    assert store.get_newest(emptied(directory), 0) == numbered(10)
    assert "format" in caplog.text


def test_another_one_of_that_name_stays(store, directory):
    commit(directory, "mine", number=5, **SMALL)
    store.put(directory, "mine")
    emptied(directory)
    mine = commit(directory, "mine", number=6, **SMALL)
    with pytest.raises(SnapshotError, match="is another one"):
        store.mend(directory, "mine")
    assert directory.manifest("mine") == mine
    assert not store.mend(directory, "yours")
