# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Saves that fail, directories that are not there, snapshots that are damaged."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time

import pytest
import torch
from patience import PATIENCE_S
from snapshot_cases import Drawing, settle, until
from sync_cases import run
from warm_starts import Setup, ranks

import torch_cpudist as cpudist
from torch_cpudist.snapshot import names as snapshot_names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.trainer_files import read_written, write_trainer
from torch_cpudist.snapshot.trees import pack


def wrapped(strategy="allreduce"):
    model = Drawing()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def stepped(opt, model, steps=1):
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(4, 4)).square().mean().backward()
        opt.step()
        settle(opt)


class Full(Files):
    """A disk without space."""

    def write(self, file, contents):
        os.write(file, memoryview(contents).cast("B")[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_goes_on_where_a_disk_is_full(tmp_path, caplog):
    def body(_):
        model, opt = wrapped()
        opt.resume(tmp_path, every_steps=2)
        stepped(opt, model, 3)
        whole, opt.snapshots.directory.files = opt.snapshots.directory.files, Full()
        stepped(opt, model, 3)
        assert opt.stats()["snapshot"]["failed"] == 2
        with pytest.raises(cpudist.SnapshotError, match="No space left"):
            opt.save_snapshot("full")
        with pytest.raises(cpudist.SnapshotError, match="3 snapshots in a row"):
            stepped(opt, model)
        # It was told; training goes on, and so do snapshots.
        opt.snapshots.directory.files = whole
        stepped(opt, model, 3)
        opt.save_snapshot("whole")
        found = opt.stats()["snapshot"]
        opt.close()
        return found

    found = run(body, 1)[0]
    assert (found["saved"], found["failed"], found["last"]) == (3, 3, "whole")
    assert "No space left" in caplog.text
    kept = Directory(tmp_path)
    assert len(kept.names()) == 3
    assert kept.uncommitted() == []  # nothing is left of those that failed


def test_a_directory_that_goes_is_made_anew(tmp_path):
    def body(_):
        model, opt = wrapped()
        opt.resume(tmp_path / "some" / "where", every_steps=1)
        stepped(opt, model, 2)
        shutil.rmtree(tmp_path / "some")
        stepped(opt, model)
        (tmp_path / "other").write_text("a file is in the way")
        shutil.rmtree(tmp_path / "some")
        os.rename(tmp_path / "other", tmp_path / "some")
        stepped(opt, model)
        opt.close()
        return opt.snapshots.stats()

    found = run(body, 1)[0]
    assert (found["saved"], found["failed"]) == (3, 1)


def test_nowhere_to_write_is_told_at_resume(tmp_path):
    (tmp_path / "file").write_text("")

    def body(_):
        _, opt = wrapped()
        with pytest.raises(cpudist.ConfigMismatchError, match="Not a directory"):
            opt.resume(tmp_path / "file" / "below")

    run(body, 1)


def saved(folder, count):
    def body(_):
        model, opt = wrapped()
        opt.resume(folder, every_steps=1, keep=count)
        stepped(opt, model, count)
        opt.close()

    run(body, 1)
    return [one.name for one in Directory(folder).committed()]


def resumed(folder):
    def body(_):
        _, opt = wrapped()
        return opt.resume(folder)

    return run(body, 1)[0]


def damage(path):
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 4
    path.write_bytes(contents)


@pytest.mark.parametrize(
    "file", ["manifest.json", "s000-dense.safetensors", "trainer-000.json"]
)
def test_resume_passes_over_what_is_damaged(file, tmp_path, caplog):
    names = saved(tmp_path, 3)
    damage(tmp_path / names[0] / file)
    caplog.clear()
    started = resumed(tmp_path)
    assert (started.name, started.step) == (names[1], 2)
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert any(file in r.getMessage() for r in warned)

    def body(_):
        _, opt = wrapped()
        opt.resume(tmp_path)
        with pytest.raises(cpudist.SnapshotCorruptError) as raised:
            opt.load_snapshot(names[0])
        assert raised.value.file.split(".")[0] in file

    run(body, 1)
    for name in names[1:]:
        os.unlink(tmp_path / name / "s000-dense.safetensors")
    with pytest.raises(cpudist.SnapshotCorruptError):
        resumed(tmp_path)


def test_only_the_newest_stay_and_those_with_a_name(tmp_path):
    def body(_):
        model, opt = wrapped()
        opt.resume(tmp_path, every_steps=1, keep=2)
        stepped(opt, model)
        assert opt.save_snapshot("mine") == "mine"
        stepped(opt, model, 4)
        with pytest.raises(cpudist.SnapshotError, match=r"in .* already"):
            opt.save_snapshot("mine")
        for wrong in ("Mine", "a/b", "", ".."):
            with pytest.raises(cpudist.InvalidArgumentError):
                opt.save_snapshot(wrong)
        with pytest.raises(cpudist.InvalidArgumentError, match="made here"):
            opt.save_snapshot("snap-000000000001-abcd")
        with pytest.raises(cpudist.SnapshotError, match="no snapshot 'other'"):
            opt.load_snapshot("other")
        opt.close()

    run(body, 1)
    names = Directory(tmp_path).names()
    assert len(names) == 3
    assert names[0] == "mine"


def test_going_back_in_a_run(tmp_path):
    def body(_):
        model, opt = wrapped()
        opt.resume(tmp_path)
        stepped(opt, model, 2)
        opt.save_snapshot("two")
        before = [p.clone() for p in model.parameters()]
        stepped(opt, model, 3)
        after = [p.clone() for p in model.parameters()]
        assert opt.load_snapshot("two").step == 2
        assert all(map(torch.equal, model.parameters(), before))
        torch.manual_seed(0)
        return after

    run(body, 1)


def test_another_model_fits_nothing(tmp_path):
    saved(tmp_path, 1)

    def body(_):
        model = torch.nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model, strategy="allreduce")
        with pytest.raises(cpudist.SnapshotError, match="nothing of this model"):
            opt.resume(tmp_path)

    run(body, 1)


def test_what_is_left_of_a_run_that_was_killed_goes(tmp_path):
    names = saved(tmp_path, 2)
    # Before the newest, and beyond it: what it was writing when it was killed.
    before_and_beyond = [tmp_path / f"snap-00000000{n}-aaaa" for n in ("0001", "2000")]
    for left in before_and_beyond:
        left.mkdir()
        (left / "trainer-000.json.tmp").write_text("{")
    kept = tmp_path / "mine"
    kept.mkdir()
    (kept / "notes.txt").write_text("not a snapshot")
    assert resumed(tmp_path).name == names[0]
    assert not any(left.exists() for left in before_and_beyond)
    assert kept.exists()


def test_what_a_run_that_was_killed_has_written_is_not_taken(tmp_path, monkeypatch):
    """Also where its snapshots have the names of this run's: there are 32 bits in them.

    Trainer 1 writes its file only when trainer 0 has looked for it.
    """
    monkeypatch.setattr(
        snapshot_names, "snapshot_name", lambda number, *_: f"snap-{number:012d}-beef"
    )
    looked = threading.Event()

    def read(folder, rank, *others):
        found = read_written(folder, rank, *others)
        looked.set()
        return found

    def write(folder, rank, *others, **options):
        assert rank == 0 or looked.wait(PATIENCE_S)
        return write_trainer(folder, rank, *others, **options)

    monkeypatch.setattr("torch_cpudist.resuming.saves.read_written", read)
    monkeypatch.setattr("torch_cpudist.resuming.saves.write_trainer", write)

    def body(context):
        model, opt = wrapped("sync")
        opt.resume(tmp_path, every_steps=3)
        for number in range(1, 5):  # by a process that lived a while longer
            left = tmp_path / f"snap-{number:012d}-beef"
            if context.trainer_rank == 0:
                dead = pack({"of": "the dead"})
                write_trainer(left, 1, dead, 5, number=number, run_id=1)
        cpudist.barrier()
        stepped(opt, model, 3)
        until(lambda: opt.stats()["snapshot"]["saved"])  # who commits may be later
        return opt.stats()["snapshot"]

    assert [found["saved"] for found in run(body, 2)] == [1, 1]
    [name] = Directory(tmp_path).names()
    snapshot = Snapshot(tmp_path / name)
    assert snapshot.verify() == []
    assert [one.steps for one in snapshot.manifest.trainers] == [3, 3]


def test_every_so_many_seconds(tmp_path):
    def body(_):
        model, opt = wrapped()
        opt.resume(tmp_path, every_s=0.05)

        def three() -> bool:
            stepped(opt, model)
            return opt.stats()["snapshot"]["saved"] >= 3

        until(three, PATIENCE_S)
        opt.close()
        return opt.snapshots.stats()["saved"]

    assert run(body, 1)[0] >= 3


def test_a_disk_that_is_slower_than_the_interval(tmp_path, monkeypatch):
    """Those that cannot be written in time are left out, and none fails."""
    known, may = Directory.commit, threading.Event()

    def late(self, manifest, place=None):
        assert may.wait(PATIENCE_S)
        return known(self, manifest, place)

    monkeypatch.setattr(Directory, "commit", late)
    setup = Setup(trainers=1, servers=1)

    def body(job):
        job.opt.resume(tmp_path, every_steps=1, keep=20)
        for step in range(20):
            job.train(step, step + 1)
            time.sleep(0.01)  # servers write within that, as a rule
        may.set()
        settle(job.opt)
        job.train(20, 21)
        settle(job.opt)
        return job.opt.stats()["snapshot"]

    [found] = ranks(setup, tmp_path, body)
    assert found["failed"] == 0
    assert 2 <= found["saved"] <= 3
    assert found["saved"] + found["skipped"] == 21
    assert len(Directory(tmp_path).names()) == found["saved"]
    assert Directory(tmp_path).uncommitted() == []


def test_who_does_not_commit_counts_parts_and_what_it_has_seen(tmp_path, monkeypatch):
    """A commit that fails is no snapshot of any trainer."""
    known = Directory.commit

    def refused(self, manifest, place=None):
        if manifest.number == 4:
            raise cpudist.SnapshotError("the disk is full")
        return known(self, manifest, place)

    monkeypatch.setattr(Directory, "commit", refused)
    over = threading.Barrier(2)

    def body(_):
        model, opt = wrapped("sync")
        opt.resume(tmp_path, every_steps=2)
        for _ in range(3):
            stepped(opt, model, 2)
            over.wait(PATIENCE_S)  # trainer 0 has committed it or failed
        found = opt.stats()["snapshot"]
        over.wait(PATIENCE_S)
        return found

    first, second = run(body, 2)
    newest = Directory(tmp_path).newest()
    assert (first["parts"], first["saved"], first["failed"]) == (2, 2, 1)
    assert (second["parts"], second["saved"], second["failed"]) == (3, 2, 0)
    assert first["last"] == second["last"] == newest


def test_a_part_that_comes_late_makes_no_directory_anew(tmp_path, monkeypatch):
    """Who commits waits for so long, and then does without that snapshot."""
    monkeypatch.setattr("torch_cpudist.resuming.saves.TRAINER_FILES_S", 0.1)
    given_up = threading.Event()

    def write(folder, rank, *others, **options):
        assert rank == 0 or given_up.wait(PATIENCE_S)
        return write_trainer(folder, rank, *others, **options)

    monkeypatch.setattr("torch_cpudist.resuming.saves.write_trainer", write)

    def body(context):
        model, opt = wrapped("sync")
        opt.resume(tmp_path, every_steps=2)
        if context.trainer_rank == 0:
            stepped(opt, model, 2)
            assert Directory(tmp_path).uncommitted() == []
            given_up.set()
        else:
            stepped(opt, model, 2)
        return opt.stats()["snapshot"]

    for found in run(body, 2):
        assert (found["saved"], found["last"]) == (0, None)
        assert (found["skipped"], found["failed"]) == (1, 0)
    assert Directory(tmp_path).uncommitted() == []
