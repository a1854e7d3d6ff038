# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots come, are listed and go; on a real file system."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from pathlib import Path

import pytest
from small_snapshots import NAME, commit, write

from torch_cpudist.errors import (
    InvalidArgumentError,
    SnapshotCorruptError,
    SnapshotError,
)
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.reading import Snapshot

STAGED = "staged.0123456789abcde0"
SMALL = {"servers": 1, "trainers": 1}


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path / "not" / "there")


def numbered(number: int, run: int = 0xAAAA, param_set: int = 0) -> str:
    return names.snapshot_name(number, run, param_set)


def test_names() -> None:
    assert names.snapshot_name(12, 0x9_12345F3A) == "snap-000000000012-12345f3a"
    longest = "snap-18446744073709551615-00000001-s2"
    assert names.snapshot_name(2**64 - 1, 1, 2) == longest
    assert names.number_of(NAME) == 12  # of the run they had 4 digits once
    assert names.number_of(f"{NAME}-s2-full") == 12
    assert names.number_of("snap-000000000012-5f3a5") is None
    for number in (0, 12, 2**64 - 1):
        for param_set in (0, 3):
            name = names.snapshot_name(number, 77, param_set)
            assert names.number_of(names.check_name(name)) == number
    assert names.number_of("best") is None
    assert names.number_of("snap-mine") is None


@pytest.mark.parametrize(
    "name", ["", "-a", "A", "a/b", "..", "a.b", "a" * 65, "größe", "a\n", None, 3]
)
def test_names_that_cannot_be(directory, name) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be called"):
        directory.folder(name)


def test_names_of_files() -> None:
    for part in (
        names.PartName(0, 0, 0),
        names.PartName(12, 3, 10_000),
        names.PartName(4095, 1234, 1),
        names.PartName(3, None),
    ):
        assert names.part_name(str(part)) == part
        assert names.is_own(str(part))
        assert names.is_own(str(part) + ".tmp")
    for other in (
        *("s0-t000-0000.safetensors", "s000-t000-0000.safetensors.tmp", "", "s000"),
        *("s0000-dense.safetensors", "s000-dense.safetensors\n", "manifest.json"),
    ):
        assert names.part_name(other) is None
    for other in ("notes.txt", "model.safetensors", ".hidden"):
        assert not names.is_own(other)


def test_nothing_is_there(directory) -> None:
    assert directory.names() == []
    assert directory.newest() is None
    assert directory.uncommitted() == []
    assert directory.keep(1) == []
    assert directory.sweep() == []
    assert not directory.path.exists()


def test_the_newest_is_what_was_committed_last(directory) -> None:
    """Also after going back to an older one, whose numbers begin again from there."""
    commit(directory, numbered(100), number=100, **SMALL)
    commit(directory, numbered(300), number=300, **SMALL)
    commit(directory, numbered(200, 0xBBBB), number=200, **SMALL)
    assert directory.newest() == numbered(200, 0xBBBB)
    assert [found.name for found in directory.committed()] == [
        *(numbered(200, 0xBBBB), numbered(300), numbered(100))
    ]
    assert [found.manifest.commit for found in directory.committed()] == [3, 2, 1]


def test_optimizers_have_snapshots_of_their_own(directory) -> None:
    for number in (10, 20, 30):
        for param_set in (0, 1):
            name = numbered(number, param_set=param_set)
            manifest = write(directory, name, number=number, **SMALL)
            directory.commit(dataclasses.replace(manifest, param_set=param_set))
    assert directory.newest(0) == numbered(30)
    assert directory.newest(1) == numbered(30, param_set=1)
    assert directory.keep(1, param_set=1) == [
        *(numbered(10, param_set=1), numbered(20, param_set=1))
    ]
    assert len(directory.names()) == 4


def test_keep_removes_the_oldest_that_nobody_named(directory) -> None:
    commit(directory, "mine", number=1, **SMALL)
    for number in (10, 20, 30, 40):
        commit(directory, numbered(number), number=number, **SMALL)
    assert directory.keep(4) == []
    assert directory.keep(2) == [numbered(10), numbered(20)]
    assert directory.names() == ["mine", numbered(30), numbered(40)]
    assert directory.keep(1) == [numbered(30)]
    assert sorted(os.listdir(directory.path)) == ["mine", numbered(40)]


def test_sweep_takes_only_what_a_dead_save_left(directory) -> None:
    commit(directory, numbered(20), number=20, **SMALL)
    for left in (numbered(10), numbered(20, 0xBBBB), numbered(30), "named"):
        folder = directory.prepare(left)
        (folder / "s000-t000-0000.safetensors").write_bytes(b"x")
        (folder / "trainer-000.safetensors.tmp").write_bytes(b"x")
    (directory.path / "token-0123").write_bytes(b"")
    (directory.path / "token-notes").write_bytes(b"what I meant to do")
    (directory.path / "Other").mkdir()
    for staged, file in (
        (STAGED, "rows-000002.safetensors"),
        (STAGED[:-1] + "f", "notes"),
    ):
        (directory.path / staged).mkdir()
        (directory.path / staged / file).write_bytes(b"x")
    assert sorted(directory.sweep()) == [
        *(numbered(10), numbered(20, 0xBBBB), numbered(30), STAGED, "token-0123")
    ]
    assert directory.uncommitted() == ["named"]
    assert sorted(os.listdir(directory.path)) == [
        *("Other", "named", numbered(20)),
        *(STAGED[:-1] + "f", "token-notes"),
    ]
    assert directory.newest() == numbered(20)


def test_what_a_first_save_has_left_is_swept(directory) -> None:
    """A run that is killed in each of its first saves would fill the disk."""
    directory.prepare(numbered(10))
    assert directory.sweep() == [numbered(10)]
    assert directory.uncommitted() == []


def test_what_another_optimizer_of_the_run_writes_is_not_swept(directory) -> None:
    other, own = numbered(30, 0xCCCC, 1), numbered(30, 0xCCCC)
    for name in (other, own, numbered(30, 0xBBBB, 1)):
        directory.prepare(name)
    run_id = 0x1_0000_CCCC
    assert directory.sweep(run_id) == [numbered(30, 0xBBBB, 1), own]
    assert directory.uncommitted() == [other]
    assert directory.sweep(run_id, 1) == [other]


def test_files_of_others_stay(directory, caplog) -> None:
    commit(directory, numbered(10), number=10, **SMALL)
    commit(directory, numbered(20), number=20, **SMALL)
    (directory.folder(numbered(10)) / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        assert directory.keep(1) == [numbered(10)]
    assert os.listdir(directory.folder(numbered(10))) == ["notes.txt"]
    assert "has files of others in it" in caplog.text
    assert directory.names() == [numbered(20)]


def test_no_snapshot_is_overwritten(directory) -> None:
    manifest = commit(directory, **SMALL)
    before = directory.manifest(NAME)
    with pytest.raises(SnapshotError, match="none is ever overwritten"):
        directory.prepare(NAME)
    with pytest.raises(SnapshotError, match="committed already"):
        directory.commit(manifest)
    assert directory.manifest(NAME) == before
    assert Snapshot(directory.folder(NAME)).verify() == []


def test_what_an_earlier_attempt_left_goes(directory) -> None:
    folder = directory.prepare(NAME)
    (folder / "s000-t000-0007.safetensors").write_bytes(b"of before")
    commit(directory, **SMALL)
    assert not (folder / "s000-t000-0007.safetensors").exists()
    assert Snapshot(folder).verify() == []


@pytest.mark.parametrize("name", ["s000-t000-0000.safetensors", "trainer-000.json"])
def test_a_file_that_did_not_come_keeps_the_snapshot_from_being(directory, name):
    manifest = write(directory, **SMALL)
    path = directory.folder(NAME) / name
    whole = path.read_bytes()
    for contents, found in ((None, "is not there"), (whole[:-1], "and has")):
        path.unlink(missing_ok=True)
        if contents is not None:
            path.write_bytes(contents)
        with pytest.raises(SnapshotError, match=rf"{name}.*{found}"):
            directory.commit(manifest)
        assert directory.newest() is None
    path.write_bytes(whole)
    directory.commit(manifest)
    assert directory.newest() == NAME


def test_a_damaged_manifest_is_passed_over(directory, caplog) -> None:
    commit(directory, numbered(10), number=10, **SMALL)
    commit(directory, numbered(20), number=20, **SMALL)
    path = directory.folder(numbered(20)) / names.MANIFEST
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        assert directory.newest() == numbered(10)
    assert f"{numbered(20)} is passed over" in caplog.text
    whole, damaged = directory.committed()
    assert whole.damage is None
    assert isinstance(damaged.damage, SnapshotCorruptError)
    with pytest.raises(SnapshotCorruptError, match=r"manifest\.json is damaged"):
        directory.manifest(numbered(20))
    # It is not the newest any more, and none that keep() counts.
    commit(directory, numbered(15, 0xBBBB), number=15, **SMALL)
    assert directory.newest() == numbered(15, 0xBBBB)


def test_a_file_where_a_directory_should_be(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    directory = Directory(tmp_path / "file")
    assert directory.names() == []
    with pytest.raises(SnapshotError, match=r"cannot make .*(directory|exists)\. "):
        directory.prepare(NAME)
    with (
        pytest.raises(SnapshotError, match=r"cannot write to .*file"),
        directory.token(),
    ):
        pass


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no file system to refuse")
def test_a_directory_that_cannot_be_written() -> None:
    directory = Directory("/proc/self/snapshots")
    with pytest.raises(SnapshotError, match="cannot make /proc/self/snapshots"):
        directory.prepare(NAME)


def test_a_token_is_seen_by_those_who_mean_the_same_directory(directory, tmp_path):
    other = Directory(tmp_path / "other")
    with directory.token() as token:
        assert Directory(str(directory.path)).sees(token)
        assert not other.sees(token)
        assert directory.names() == []
        with directory.token() as second:
            assert second != token
    assert os.listdir(directory.path) == []


@pytest.mark.parametrize("contents", [b"", b"a word"])
def test_a_word_is_there_until_it_is_taken_away(contents, directory) -> None:
    directory.write_word("token-word", contents)
    assert os.listdir(directory.path) == ["token-word"]
    assert directory.files.read(directory.path / "token-word") == contents
    for _ in range(2):
        directory.remove_word("token-word")
        assert os.listdir(directory.path) == []


def test_paths_do_not_depend_on_where_the_program_is(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Directory("here")
    monkeypatch.chdir("/")
    commit(directory, **SMALL)
    assert (tmp_path / "here" / NAME / names.MANIFEST).exists()


def test_one_that_cannot_be_read_keeps_only_what_it_may_need(tmp_path, caplog) -> None:
    """Else a disk fills up behind one bad sector, without a word."""

    class Unreadable(Files):
        def read(self, path: Path) -> bytes:
            if path.parent.name == numbered(30):
                raise OSError(errno.EIO, "Input/output error")
            return super().read(path)

    directory = Directory(tmp_path, Unreadable())
    other = [numbered(number, 0xBBBB) for number in (5, 6)]
    own = [numbered(number) for number in (20, 30, 40, 50, 60)]
    for name in [*other, *own]:
        commit(Directory(tmp_path), name, number=names.number_of(name), **SMALL)
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        assert directory.keep(1) == [*other, numbered(40), numbered(50)]
        commit(Directory(tmp_path), numbered(70), number=70, **SMALL)
        assert directory.keep(1) == [numbered(60)]
    told = [r.getMessage() for r in caplog.records if numbered(30) in r.getMessage()]
    assert len(told) == 1
    assert f"{numbered(30)}/manifest.json: Input/output error" in told[0]
    assert directory.names() == [numbered(20), numbered(30), numbered(70)]


def test_a_token_that_this_run_is_writing_is_not_swept(directory) -> None:
    """It is empty for a moment, while another trainer sweeps."""
    run_id = 0x1_0000_AAAA
    mine, others = (names.run_token(one, "0-of-1-1.tmp") for one in (run_id, 7))
    directory.path.mkdir(parents=True, exist_ok=True)
    for name in (mine, others):
        (directory.path / name).write_bytes(b"")
    assert directory.sweep(run_id) == [others]
    assert (directory.path / mine).exists()
