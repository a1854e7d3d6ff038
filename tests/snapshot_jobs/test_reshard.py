# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots loaded by other numbers of servers, and into tables of another kind."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from snapshot_cases import settle
from warm_starts import ADAM, ROWS, Setup, ranks, same, saved, there

from torch_cpudist.snapshot.directory import Directory

KINDS = pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])


@KINDS
def test_another_directory_and_number_of_servers_bit_for_bit(remote, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    setup = Setup(remote=remote, servers=2, average=0.9, rule=ADAM)

    def whole(job):
        job.opt.resume(old)
        job.train(0, 5)
        job.opt.save_snapshot("here")
        job.train(5, 11)
        return job.values(), job.averages()

    expected = ranks(setup, old, whole)[0]
    (tmp_path / "link").symlink_to(old)

    def body(job):
        job.opt.resume(new)
        started = job.opt.load_snapshot(tmp_path / "link" / "here")
        assert (started.step, started.name) == (5, "here")
        job.train(5, 11)
        job.opt.save_snapshot("then")
        return job.values(), job.averages()

    for found in ranks(replace(setup, servers=0, seed=9), new, body):
        assert all(map(same, found, expected))
    assert Directory(new).names() == ["then"]


def test_rows_that_nobody_trained_are_those_of_before(tmp_path):
    """Also where the script draws another seed at each start."""
    setup = Setup(remote=True, servers=2)
    values, _ = saved(setup, tmp_path)

    def body(job):
        job.opt.resume(tmp_path)
        found = job.values()
        job.opt.save_snapshot("again")
        return found

    assert same(ranks(replace(setup, seed=2), tmp_path, body)[0], values)
    # The next snapshot says so, too.
    shutil.rmtree(tmp_path / "here")

    def third(job):
        assert job.opt.resume(tmp_path).name == "again"
        return job.values()

    assert same(ranks(replace(setup, seed=3), tmp_path, third)[0], values)


@pytest.mark.parametrize("remote", [False, True], ids=["to static", "to remote"])
def test_static_and_remote_tables_take_each_others_rows(remote, tmp_path):
    setup = Setup(remote=not remote, servers=3, average=0.9, seed=4)
    values, averages = saved(setup, tmp_path)

    def body(job):
        job.opt.resume(tmp_path)
        found = job.values(), job.averages()
        job.train(6, 8)
        return found

    then = replace(setup, remote=remote, servers=2, seed=5)
    for found, found_averages in ranks(then, tmp_path, body):
        assert same(found, values)
        assert same(found_averages, averages)


@pytest.mark.parametrize("servers", [3, 1, 20])
@KINDS
def test_saved_on_seven_servers(remote, servers, tmp_path):
    setup = Setup(remote=remote, servers=7, average=0.9)

    def whole(job):
        job.opt.resume(tmp_path)
        job.train(0, 5)
        job.opt.save_snapshot("here")
        job.train(5, 9)
        return job.values(), job.averages()

    expected = ranks(setup, tmp_path, whole)[0]

    def body(job):
        assert job.opt.resume(tmp_path).step == 5
        job.train(5, 9)
        return job.values(), job.averages()

    for found in ranks(replace(setup, servers=servers, seed=3), tmp_path, body):
        assert all(map(same, found, expected))


@pytest.mark.parametrize("remote", [None, False, True], ids=["", "static", "remote"])
def test_tables_and_dense_parameters_become_each_other(remote, tmp_path):
    """``None``: of a remote table becomes a dense parameter."""
    dense = Setup(sparse=False, average=0.9)
    first, then = dense, replace(dense, sparse=True, remote=bool(remote))
    if remote is None:
        first, then = replace(dense, sparse=True, remote=True), dense
    values, _ = saved(first, tmp_path)

    def body(job):
        started = job.opt.resume(tmp_path)
        assert started.step == 6
        assert (started.missing, started.unused) == ({}, ())
        found = job.values()
        assert same(found, values)
        assert torch.equal(job.averages()["a.weight"], values["a.weight"])
        job.train(6, 9)
        return job.values()

    one, other = ranks(replace(then, servers=3, seed=4), tmp_path, body)
    assert same(one, other)
    assert there(tmp_path) == {"here"}


def test_snapshots_of_changes_into_anything(tmp_path):
    """Under other names, as static tables, as dense parameters: a chain of three."""
    old = tmp_path / "old"
    first = Setup(remote=True, servers=3, average=0.8)

    def body(job):
        job.opt.resume(old, every_steps=100, delta_every_steps=2)
        job.opt.save_snapshot("full")
        for step in range(0, 6, 2):
            job.train(step, step + 2)
            settle(job.opt)
        return job.values(), job.averages()

    values, averages = ranks(replace(first, trainers=1), old, body)[0]
    [found, *_] = Directory(old).committed()
    newest = found.name
    assert len(found.members) >= 3
    cases = {
        "remote": (replace(first, tables={"x": ROWS, "b": ROWS}), {"a.": "x."}),
        "static": (replace(first, remote=False), None),
        "dense": (replace(first, remote=False, sparse=False), None),
    }
    for kind, (setup, moves) in cases.items():
        new = tmp_path / kind

        def then(job, new=new, moves=moves, kind=kind):
            job.opt.resume(new)
            job.train(20, 23)
            started = job.opt.load_snapshot(old / newest, map=moves)
            assert (started.step, started.missing, started.unused) == (6, {}, ())
            found = job.values()
            renamed = {"a.weight": "x.weight"} if moves else {}
            expected = {renamed.get(n, n): v for n, v in values.items()}
            assert same(found, expected)
            if kind != "dense":
                found = job.averages()
                assert same(found, {renamed.get(n, n): v for n, v in averages.items()})

        ranks(replace(setup, servers=2, seed=8), new, then)
        assert there(new) == set()
