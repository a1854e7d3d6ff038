# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What came of a snapshot, told where trainers have no place but the directory."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from torch_cpudist.resuming.meeting import Meeting
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files


def meeting(path, rank, files):
    """Of a trainer in a job of its own."""
    apart = SimpleNamespace(apart=object())
    run = SimpleNamespace(
        environment=apart, rendezvous=None, run_id=3, trainer_rank=rank
    )
    return Meeting(run, Directory(path / "snapshots", files), 0)


@pytest.fixture
def meetings(tmp_path):
    return [meeting(tmp_path, rank, Files()) for rank in range(2)]


def test_the_outcome_of_each_is_told_by_files_of_the_directory(meetings, tmp_path):
    leader, other = meetings
    assert (other.saved(5), other.failed(5)) == (False, None)
    leader.tell(5, None)
    assert (other.saved(5), other.failed(5)) == (True, None)
    assert (other.saved(6), other.failed(6)) == (False, None)
    leader.tell(6, "the disk is full")
    assert not other.saved(6)
    assert "log says why" in other.failed(6)
    # That of the one before is gone, and the next run takes this one away.
    [left] = (tmp_path / "snapshots").iterdir()
    assert Directory(tmp_path / "snapshots").sweep() == [left.name]


def test_a_directory_that_cannot_be_written(meetings, tmp_path):
    (tmp_path / "snapshots").write_text("a file is in the way")
    meetings[0].tell(5, "it is gone")
    assert not meetings[1].saved(5)


class ReadOnly(Files):
    """A disk from which nothing goes any more."""

    def unlink(self, path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_word_that_does_not_go_is_no_error(tmp_path):
    """Nobody looks for it any more."""
    leader, other = meeting(tmp_path, 0, ReadOnly()), meeting(tmp_path, 1, Files())
    leader.tell(5, None)
    leader.tell(6, "the disk is full")
    assert other.saved(5)
    assert other.failed(6) is not None
