# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs that save to an object store, and go on from there on an empty host."""

from __future__ import annotations

import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from snapshot_parity import Job, ended, settle
from sync_cases import assert_same_bits
from warm_starts import Setup, ranks, same, saved, there

import torch_cpudist as cpudist
from torch_cpudist.resuming import snapshots
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.store import Store

fsspec = pytest.importorskip("fsspec")

URL = "memory://bucket/prefix"


@pytest.fixture
def store():
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield Store(URL)
    system.store.clear()


def at(folder):
    """Arguments of ``resume`` for a store, and what tells servers of the directory."""
    return {"path": URL, "staging": folder}


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
def test_goes_on_from_the_store_where_there_is_nothing(store, remote, tmp_path):
    options = {"staging": tmp_path, "keep": 2}
    job = Job(2, 2, remote=remote, options=options)
    whole = ended(Job(2, 2, remote=remote), 14)
    first = ended(job, 10, tmp_path, at=URL)
    assert all(stats["failed"] == 0 for _, _, stats in first)
    names = [found.name for found in store.committed()]
    assert names == [found.name for found in Directory(tmp_path).committed()]
    assert len(names) == 2
    for again in tmp_path.iterdir():
        shutil.rmtree(again)
    for found, started, _ in ended(replace(job, servers=3), 14, tmp_path, at=URL):
        assert (started.step, started.name) == (8, names[0])
        assert_same_bits(found, whole[0][0])
    assert names[0] in Directory(tmp_path).names()


def test_goes_on_from_the_directory_where_that_is_newer(store, tmp_path):
    setup = Setup()
    saved(setup, tmp_path, name="mine")  # never copied

    def body(job):
        assert job.opt.resume(**at(tmp_path)).name == "mine"
        assert job.opt.save_snapshot("then") == "then"

    ranks(setup, tmp_path, body)
    assert [found.name for found in store.committed()] == ["then"]


def test_by_name_from_the_store_and_by_url(store, tmp_path):
    setup = Setup(servers=3, average=0.5)
    expected = []

    def first(job):
        job.opt.resume(**at(tmp_path / "old"))
        job.train(0, 4)
        job.opt.save_snapshot("four")
        expected.append((job.values(), job.averages()))
        job.train(4, 6)

    ranks(setup, tmp_path / "old", first)
    values, averages = expected[0]
    new = tmp_path / "new"

    def by_name(job):
        job.opt.resume(**at(new))
        job.train(0, 3)
        shutil.rmtree(new / "four", ignore_errors=True)
        cpudist.barrier()
        assert job.opt.load_snapshot("four").step == 4
        assert same(job.values(), values)
        with pytest.raises(cpudist.SnapshotError, match="no snapshot 'five' in memory"):
            job.opt.load_snapshot("five")

    ranks(setup, new, by_name)

    def by_url(job):
        job.opt.resume(tmp_path / "other")
        job.train(0, 3)
        before = job.values()
        started = job.opt.load_snapshot(f"{URL}/four/", only=["b.*"])
        assert started.taken == {"b.weight": "b.weight"}
        found = job.values()
        assert same(found, {**before, "b.weight": values["b.weight"]})
        assert (job.averages()["b.weight"] == averages["b.weight"]).all()
        assert job.opt.load_snapshot(f"{URL}/four").step == 4
        assert same(job.values(), values)
        for wrong in (f"{URL}/FOUR", f"{URL}/a.b"):
            with pytest.raises(cpudist.InvalidArgumentError):
                job.opt.load_snapshot(wrong)

    ranks(replace(setup, servers=2), tmp_path / "other", by_url)
    assert there(tmp_path / "other") == set()


def test_a_chain_goes_there_and_back(store, tmp_path):
    setup = Setup(trainers=1, remote=True)

    def body(job):
        job.opt.resume(
            **at(tmp_path), every_steps=4, delta_every_steps=1, full_every=9, keep=2
        )
        for step in range(7):
            job.train(step, step + 1)
            settle(job.opt)
        stats = job.opt.stats()["snapshot"]
        assert (stats["saved"], stats["failed"]) == (7, 0)
        return job.values()

    values = ranks(setup, tmp_path, body)[0]
    newest = store.committed()[0]
    assert len(newest.members) == 4
    shutil.rmtree(tmp_path)

    def then(job):
        assert job.opt.resume(**at(tmp_path)).name == newest.name
        assert same(job.values(), values)

    ranks(replace(setup, servers=3, seed=7), tmp_path, then)
    assert set(newest.members) <= there(tmp_path)


def go_on(job, first, last):
    """One step after the other, each with what it saves."""
    for step in range(first, last):
        job.train(step, step + 1)
        settle(job.opt)


def breakable(store, monkeypatch):
    """A list whose only element says whether copies to the store fail."""
    broken = [False]
    put_file = store.system.__class__.put_file

    def failing(self, *args, **kwargs):
        if broken[0]:
            raise ConnectionError("the store is away")
        return put_file(self, *args, **kwargs)

    monkeypatch.setattr(store.system.__class__, "put_file", failing)
    return broken


def test_a_store_that_fails_is_counted_and_training_goes_on(
    store, tmp_path, monkeypatch, caplog
):
    broken = breakable(store, monkeypatch)

    def body(job):
        job.opt.resume(**at(tmp_path), every_steps=2, keep=1)
        job.train(0, 2)
        settle(job.opt)
        assert len(store.committed()) == 1
        broken[0] = True
        job.train(2, 4)
        settle(job.opt)
        stats = job.opt.stats()["snapshot"]
        assert (stats["saved"], stats["failed"]) == (2, 0)
        assert (stats["copied"], stats["not_copied"]) == (1, 1)
        with pytest.raises(cpudist.SnapshotError, match="the store is away"):
            job.opt.save_snapshot("mine")
        broken[0] = False
        job.train(4, 6)
        settle(job.opt)
        stats = job.opt.stats()["snapshot"]
        assert (stats["saved"], stats["failed"]) == (4, 0)
        assert (stats["copied"], stats["not_copied"]) == (2, 2)
        broken[0] = True
        go_on(job, 6, 20)  # however many fail: all are here
        stats = job.opt.stats()["snapshot"]
        assert (stats["saved"], stats["failed"]) == (11, 0)
        assert (stats["copied"], stats["not_copied"]) == (2, 9)

    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        ranks(Setup(trainers=1), tmp_path, body)
    assert f"is in {tmp_path} only" in caplog.text
    [newest] = [found.manifest for found in store.committed()]
    assert newest.version.steps == 6
    # What could not be copied is here all the same.
    names = set(Directory(tmp_path).names())
    assert len(names) == 2
    assert names > {"mine"}


def test_a_store_that_cannot_be_written_is_told_at_once(store, tmp_path, monkeypatch):
    def refused(self, *args, **kwargs):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(store.system.__class__, "pipe_file", refused)

    def body(job):
        with pytest.raises(cpudist.SnapshotError, match="Access Denied"):
            job.opt.resume(**at(tmp_path))

    ranks(Setup(), tmp_path, body)


def test_arguments_that_cannot_be(tmp_path):
    refused = [
        (
            {"path": tmp_path, "staging": tmp_path},
            cpudist.InvalidArgumentError,
            "is for a URL",
        ),
        (
            {"path": Path(URL), "staging": tmp_path},
            cpudist.InvalidArgumentError,
            "as a text",
        ),
        ({"path": URL}, cpudist.ConfigurationError, "Pass staging="),
        ({"path": URL, "staging": 3}, cpudist.InvalidArgumentError, "staging=3"),
        (
            {"path": "nosuch://x", "staging": tmp_path},
            cpudist.ConfigurationError,
            "no driver for nosuch",
        ),
    ]

    def body(job):
        for arguments, kind, told in refused:
            with pytest.raises(kind, match=told):
                job.opt.resume(**arguments)

    ranks(Setup(trainers=1, servers=0), None, body)


def test_servers_are_told_of_a_directory_and_not_of_a_url(tmp_path):
    def body(job):
        with pytest.raises(cpudist.ConfigurationError, match="servers write to a dir"):
            job.opt.resume()

    ranks(Setup(trainers=1, servers=0), URL, body)


def test_all_are_told_what_came_of_a_copy(store, tmp_path, monkeypatch):
    """Also those who do not copy: nobody goes on to another step than the others."""
    broken = breakable(store, monkeypatch)

    def body(job):
        job.opt.resume(**at(tmp_path))
        job.train(0, 1)
        broken[0] = True
        with pytest.raises(cpudist.SnapshotError, match="the store is away"):
            job.opt.save_snapshot("first")
        cpudist.barrier()
        broken[0] = False
        assert job.opt.save_snapshot("second") == "second"
        assert "second" in {one.name for one in store.committed()}
        cpudist.barrier()
        if job.rank == 0:
            shutil.rmtree(tmp_path / "second")
        cpudist.barrier()
        with pytest.raises(cpudist.SnapshotError, match=r"in memory://.* already"):
            job.opt.save_snapshot("second")
        job.train(1, 2)
        job.opt.save_snapshot("third")

    ranks(Setup(), tmp_path, body)
    found = {one.name: one.manifest for one in store.committed()}
    assert {name: one.version.round for name, one in found.items()} == {
        "second": 1,
        "third": 2,
    }


def test_a_store_that_one_trainer_cannot_open(store, tmp_path, monkeypatch):
    """All are told, and nobody waits for that one."""
    known = snapshots.Store

    def some(url):
        if threading.current_thread() in without:
            raise cpudist.ConfigurationError("there is no driver here")
        return known(url)

    without = set()
    monkeypatch.setattr(snapshots, "Store", some)

    def body(job):
        if job.rank == 1:
            without.add(threading.current_thread())
        with pytest.raises(cpudist.ConfigurationError, match="no driver here"):
            job.opt.resume(**at(tmp_path))

    ranks(Setup(), tmp_path, body)


@pytest.mark.parametrize("damage", ["manifest", "rows", "base"])
def test_what_is_damaged_here_and_whole_there_is_copied_again(store, damage, tmp_path):
    setup = Setup(trainers=1)

    def first(job):
        job.opt.resume(**at(tmp_path), every_steps=3, delta_every_steps=1)
        go_on(job, 0, 2)
        return job.values()

    values = ranks(setup, tmp_path, first)[0]
    newest = store.committed()[0]
    assert len(newest.members) == 2

    def harm():
        one = newest.members[1 if damage == "base" else 0]
        if damage == "manifest":
            path = tmp_path / one / "manifest.json"
            path.write_bytes(path.read_bytes()[:-30])
            return
        parts = list((tmp_path / one).glob("s000-t000*"))
        assert parts
        for path in parts:
            path.unlink()

    def then(job):
        harm()
        assert job.opt.resume(**at(tmp_path)).name == newest.name
        assert same(job.values(), values)
        job.train(2, 4)
        harm()
        assert job.opt.load_snapshot(newest.name).step == 2
        assert same(job.values(), values)

    ranks(setup, tmp_path, then)
    assert [one.damage for one in Directory(tmp_path).committed()] == [None] * 2
