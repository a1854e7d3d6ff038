# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What came of a snapshot, told where trainers have no place but the directory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torch_cpudist.resuming.meeting import Meeting
from torch_cpudist.snapshot.directory import Directory


@pytest.fixture
def meetings(tmp_path):
    """Of two trainers in jobs of their own."""
    apart = SimpleNamespace(apart=object())
    return [
        Meeting(
            SimpleNamespace(
                environment=apart, rendezvous=None, run_id=3, trainer_rank=rank
            ),
            Directory(tmp_path / "snapshots"),
            0,
        )
        for rank in range(2)
    ]


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
