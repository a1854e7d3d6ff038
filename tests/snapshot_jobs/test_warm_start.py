# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one way to load, from everywhere and with everything that fails
"""Some tables of a snapshot, under other names, from other directories and models."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
import torch
from warm_starts import ADAGRAD, ADAM, ROWS, Setup, ranks, same, saved, there

import torch_cpudist as cpudist
from torch_cpudist.drivers.served_saving import ServedSaving
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files

KINDS = pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])


@pytest.fixture(params=["beside", "elsewhere"])
def folders(request, tmp_path):
    """Where a snapshot is, its name for the next run, and where that one saves."""
    if request.param == "beside":
        return tmp_path, "here", tmp_path
    return tmp_path / "old", tmp_path / "old" / "here", tmp_path / "new"


def assert_tidy(folder):
    assert there(folder) == set(Directory(folder).names())


@KINDS
def test_one_table_while_a_run_goes_on(remote, folders):
    old, name, new = folders
    setup = Setup(remote=remote, servers=3, average=0.8)
    values, averages = saved(setup, old)

    def body(job):
        job.opt.resume(new)
        job.train(10, 17)
        before = job.values(), job.averages()
        random, steps = torch.get_rng_state(), job.opt.stats()["steps"]
        started = job.opt.load_snapshot(name, only=["a.*"])
        assert torch.equal(random, torch.get_rng_state())
        assert (started.step, job.opt.stats()["steps"]) == (steps, steps)
        assert (started.name, started.missing) == ("here", {})
        assert started.taken == {"a.weight": "a.weight"}
        assert set(started.unused) == {"b.weight", "top.weight", "top.bias"}
        [line] = started.report
        assert line.startswith("table 'a.weight': ")
        after = job.values(), job.averages()
        for found, expected, others in zip(
            after, (values, averages), before, strict=True
        ):
            assert same(found, {**others, "a.weight": expected["a.weight"]})
        job.train(17, 19)
        return job.values(), job.averages()

    found = ranks(replace(setup, servers=2, seed=2), new, body)
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])
    assert not torch.equal(found[0][0]["a.weight"], values["a.weight"])
    assert_tidy(new)


@KINDS
def test_tables_and_parameters_with_new_names(remote, folders):
    """A run goes back as a whole, and ends where it would have ended."""
    old, name, new = folders
    setup = Setup(remote=remote, servers=3, average=0.8, seed=5)

    def whole(job):
        job.opt.resume(old)
        job.train(0, 6)
        job.opt.save_snapshot("here")
        job.train(6, 12)
        return job.values(), job.averages()

    expected = ranks(setup, old, whole)[0]
    moves = {"a": "users", "b": "b", "top": "head"}
    renamed = {"a.weight": "users.weight", "top.": "head."}
    then = replace(
        setup, tables={"users": ROWS, "b": ROWS}, dense="head", servers=2, seed=6
    )

    def body(job):
        job.opt.resume(new)
        job.train(20, 22)
        started = job.opt.load_snapshot(name, map=renamed)
        assert started.step == 6
        assert (started.missing, started.unused) == ({}, ())
        assert started.taken["users.weight"] == "a.weight"
        job.train(6, 12)
        return job.values(), job.averages()

    def named(found):
        parts = (name.split(".") for name in found)
        return {
            f"{moves[module]}.{name}": found[f"{module}.{name}"]
            for module, name in parts
        }

    for found in ranks(then, new, body):
        for mine, theirs in zip(found, expected, strict=True):
            assert same(mine, named(theirs))
    assert_tidy(new)


@KINDS
def test_tables_that_came_and_went(remote, folders):
    """Those that are not in it stay as they are, with their averages."""
    old, name, new = folders
    setup = Setup(remote=remote, average=0.8, tables={"gone": ROWS, "kept": ROWS})
    values, averages = saved(setup, old)
    then = replace(setup, tables={"kept": ROWS + 10, "new": ROWS}, seed=2)

    def body(job):
        job.opt.resume(new)
        job.train(0, 20)
        before = job.values(), job.averages()
        started = job.opt.load_snapshot(name)
        assert started.step == 6
        assert set(started.missing) == {"new.weight"}
        assert (
            "is not in the snapshot and stays as it is" in started.missing["new.weight"]
        )
        assert started.unused == ("gone.weight",)
        assert "'gone.weight' of the snapshot is not in the model" in started.report
        rest = "begin anew" if remote else "stay as they are"
        assert any(
            f"rows from {ROWS} on are not in it and {rest}" in line
            for line in started.report
        )
        after = job.values(), job.averages()
        for mine, saved_then, was in zip(
            after, (values, averages), before, strict=True
        ):
            assert torch.equal(mine["kept.weight"][:ROWS], saved_then["kept.weight"])
            assert torch.equal(mine["top.weight"], saved_then["top.weight"])
            assert torch.equal(mine["new.weight"], was["new.weight"])
        job.train(6, 9)
        return job.values()

    one, other = ranks(then, new, body)
    assert same(one, other)


def test_another_rule_takes_values_and_not_state(tmp_path):
    setup = Setup()
    values, _ = saved(setup, tmp_path)

    def body(job):
        started = job.opt.resume(tmp_path)
        assert sum("without" in line for line in started.report) == 4
        assert same(job.values(), values)
        state = job.opt.state_dict()["state"]
        assert all(float(one["step"]) == 0 for one in state.values())
        job.train(6, 8)

    ranks(replace(setup, rule=ADAM), tmp_path, body)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
@KINDS
def test_averages_by_another_decay(remote, decay, tmp_path):
    setup = Setup(remote=remote, average=0.9)
    values, averages = saved(setup, tmp_path)

    def body(job):
        job.opt.resume(tmp_path)
        assert same(job.values(), values)
        if not decay:
            return
        for name, found in job.averages().items():
            torch.testing.assert_close(found, averages[name], rtol=1e-6, atol=1e-7)
        ids = torch.arange(ROWS // 2, ROWS // 2 + 6).unsqueeze(1)
        before = job.averages()["a.weight"]
        for _ in range(3):  # of other rows
            job.opt.zero_grad()
            job.model(ids).sum().backward()
            job.opt.step()
        row = job.values()["a.weight"][0]
        expected = row + decay**3 * (before[0] - row)
        torch.testing.assert_close(job.averages()["a.weight"][0], expected)

    ranks(replace(setup, average=decay, seed=2), tmp_path, body)


REFUSED = [
    ({"only": ["c.weight"]}, "no parameter of the model"),
    ({"only": ["a.weight"], "map": {"x": "a.weight"}}, "no such name"),
    ({"map": {"a.weight": "c.weight"}}, "the model has no such"),
]


@pytest.mark.parametrize(("asked", "told"), REFUSED)
def test_refused_before_anything_is_changed(asked, told, folders):
    old, name, new = folders
    setup = Setup()
    saved(setup, old)

    def body(job):
        job.opt.resume(new)
        job.train(6, 9)
        before = job.values()
        with pytest.raises(cpudist.SnapshotError, match=told):
            job.opt.load_snapshot(name, **asked)
        assert same(job.values(), before)
        job.train(9, 10)

    ranks(setup, new, body)


def test_rows_of_another_length_stay_out(tmp_path):
    saved(Setup(), tmp_path / "old")
    name = tmp_path / "old" / "here"

    def body(job):
        job.opt.resume(tmp_path / "new")
        before = job.values()
        with pytest.raises(cpudist.SnapshotError, match="of 4, is 200 of 8"):
            job.opt.load_snapshot(name, only=["a.weight"])
        with pytest.raises(cpudist.SnapshotError, match="nothing of this model"):
            job.opt.load_snapshot(name, only=["*.weight"])
        assert same(job.values(), before)
        started = job.opt.load_snapshot(name, only=["*"])
        assert started.taken == {"top.bias": "top.bias"}
        assert set(started.missing) == {"a.weight", "b.weight", "top.weight"}
        assert len(started.report) == 3

    ranks(Setup(dim=8), tmp_path / "new", body)


def test_what_lies_elsewhere_is_named(tmp_path):
    setup = Setup(trainers=2)
    saved(setup, tmp_path / "old")

    def body(job):
        job.opt.resume(tmp_path / "new")
        before = job.values()
        for path, told in (
            (tmp_path / "none" / "here", "no snapshot 'here'"),
            (tmp_path / "old", r"has snapshots in it: \['here'\]"),
        ):
            with pytest.raises(cpudist.SnapshotError, match=told):
                job.opt.load_snapshot(path)
        for wrong in (5, "", b"x/y"):
            with pytest.raises(cpudist.InvalidArgumentError):
                job.opt.load_snapshot(wrong)
        assert same(job.values(), before)

    ranks(setup, tmp_path / "new", body)


class Full(Files):
    """A disk without room for rows on their way to servers."""

    def create(self, path):
        if path.name.startswith("rows-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


def test_a_load_that_ends_half_way_says_so(tmp_path, caplog):
    setup = Setup(remote=True)
    values, _ = saved(setup, tmp_path / "old")

    def body(job):
        job.opt.resume(tmp_path / "new")
        files = job.opt.snapshots.directory.files
        job.opt.snapshots.directory.files = Full()
        with pytest.raises(cpudist.SnapshotError, match=r"No space.*Part of it was"):
            job.opt.load_snapshot(tmp_path / "old" / "here", only=["a.*"])
        job.opt.snapshots.directory.files = files
        for refused in (lambda: job.train(0, 1), job.opt.save_snapshot):
            with pytest.raises(cpudist.SnapshotError, match="Part of it was"):
                refused()
        job.opt.load_snapshot(tmp_path / "old" / "here", only=["a.*"])
        assert torch.equal(job.values()["a.weight"], values["a.weight"])

    ranks(setup, tmp_path / "new", body)
    assert_tidy(tmp_path / "new")


def test_trainers_call_one_directory_by_names_of_their_own(tmp_path):
    """Each takes the same way through the barriers, and the next round is of both."""
    values, _ = saved(Setup(), tmp_path / "real")
    for rank in range(2):
        (tmp_path / f"of_{rank}").symlink_to(tmp_path / "real")

    def body(job):
        job.opt.resume(tmp_path / f"of_{job.rank}")
        job.train(3, 5)
        job.opt.load_snapshot(tmp_path / "of_0" / "here")
        found = job.values()
        before = cpudist.global_step()
        job.train(6, 7)
        return found, cpudist.global_step() - before

    for found, steps in ranks(Setup(seed=2), tmp_path / "real", body):
        assert same(found, values)
        assert steps == 1


def test_averages_come_with_the_state_or_begin_anew(tmp_path):
    decay = 0.9
    values, averages = saved(Setup(average=decay), tmp_path / "old")
    assert not torch.equal(values["a.weight"], averages["a.weight"])

    def body(job):
        job.opt.resume(tmp_path / "new")  # of another rule, and before the first step
        job.opt.load_snapshot(tmp_path / "old" / "here", only=["*"])
        first = job.averages()
        job.opt.zero_grad()
        (job.model(torch.zeros(1, 1, dtype=torch.int64)) * 0.0).sum().backward()
        job.opt.step()
        return first, job.averages()

    for rule, expected in ((ADAM, values), (ADAGRAD, averages)):
        setup = Setup(average=decay, rule=rule, seed=3)
        for first, later in ranks(setup, tmp_path / "new", body):
            assert same(first, expected)
            for name, value in values.items():
                # What has not moved draws its average on: nowhere else than to itself.
                drawn = value + decay * (expected[name] - value)
                torch.testing.assert_close(later[name], drawn, atol=1e-6, rtol=0)


STRATEGIES = {
    "async": cpudist.Async,
    "half": lambda: cpudist.HalfAsync(group=[[0], [1]]),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_where_trainers_are_at_steps_of_their_own(kind, tmp_path):
    values, _ = saved(Setup(servers=3), tmp_path / "old")

    def body(job):
        job.opt.resume(tmp_path / "new")
        job.train(0, 4 + job.rank)
        started = job.opt.load_snapshot(
            tmp_path / "old" / "here", only=["b.weight"], map={"a.weight": "b.weight"}
        )
        found = job.values()["b.weight"]
        cpudist.barrier()  # all have looked
        job.train(9, 11)
        assert torch.equal(found, values["a.weight"])
        assert started.taken == {"b.weight": "a.weight"}

    ranks(Setup(strategy=STRATEGIES[kind], seed=2), tmp_path / "new", body)


def test_some_of_what_servers_and_trainers_have(tmp_path):
    """Under Hybrid, from a snapshot of Sync: tables of servers, the rest here."""
    values, _ = saved(Setup(trainers=1), tmp_path / "old")

    def body(job):
        job.opt.resume(tmp_path / "new")
        job.train(0, 3)
        job.opt.flush()  # tables are Async's
        before = job.values()
        name = tmp_path / "old" / "here"
        started = job.opt.load_snapshot(name, only=["a.*", "top.bias"])
        assert set(started.taken) == {"a.weight", "top.bias"}
        chosen = {name: values[name] for name in started.taken}
        assert same(job.values(), {**before, **chosen})
        # What torch keeps of dense parameters is not in files of servers.
        assert "state of 'top.bias' is not in it" in started.report[-1]
        job.train(3, 4)
        assert job.opt.load_snapshot(name).step == 6
        assert same(job.values(), values)
        with pytest.raises(cpudist.SnapshotError, match="no parameter of the model"):
            job.opt.load_snapshot(name, only=["a.*", "x"])
        job.train(6, 8)

    hybrid = Setup(trainers=1, strategy=cpudist.Hybrid, seed=2)
    ranks(hybrid, tmp_path / "new", body)


class _FullForWords(Files):
    """A disk that is full when trainer 0 is to say what it has loaded."""

    def create(self, path):
        if path.name.startswith("token-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


def test_a_full_disk_keeps_trainers_together(tmp_path):
    """What was loaded is told without a file, where trainers have a place for it."""
    setup = Setup()

    def body(job):
        job.opt.resume(tmp_path)
        job.train(0, 2)
        job.opt.save_snapshot("here")
        before = job.values()
        job.train(2, 4)
        job.opt.snapshots.directory.files = _FullForWords()
        assert job.opt.load_snapshot("here").step == 2
        assert same(job.values(), before)
        job.train(2, 3)

    ranks(setup, tmp_path, body)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_error_of_any_kind_is_one_of_all_trainers(after, tmp_path, monkeypatch):
    """Nobody is left at a barrier, and none trains on with values of two moments."""
    setup = Setup()
    known = ServedSaving.load

    def load(self, *others):
        if after or not refusing:
            known(self, *others)
        if refusing:
            raise RuntimeError("out of something")

    monkeypatch.setattr(ServedSaving, "load", load)
    refusing = [1]

    def body(job):
        job.opt.resume(tmp_path)
        job.train(0, 2)
        job.opt.save_snapshot("here")
        with pytest.raises(cpudist.SnapshotError, match="out of something") as raised:
            job.opt.load_snapshot("here")
        assert raised.value.partly_loaded
        with pytest.raises(cpudist.SnapshotError, match="load a snapshot as a whole"):
            job.train(2, 3)
        cpudist.barrier()
        refusing.clear()
        assert job.opt.load_snapshot("here").step == 2
        job.train(2, 3)

    ranks(setup, tmp_path, body)
