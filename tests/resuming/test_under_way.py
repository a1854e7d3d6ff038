# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What trainers are told that wait for values, and disks that are full."""

from __future__ import annotations

import errno
import logging
import os
from types import SimpleNamespace

import pytest

import torch_cpudist as cpudist
from torch_cpudist.resuming.under_way import Begun, UnderWay
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files


def waiting(path, check=lambda: None, files=None, **others):
    client = SimpleNamespace(check=check)
    run = SimpleNamespace(
        run_id=7,
        incarnation=1,
        trainer_rank=1,
        trainer_count=2,
        trainer_client=lambda: client,
    )
    return UnderWay(run, Directory(path, files or Files()), 0, **others)


def test_at_the_start_every_trainer_has_to_resume(tmp_path):
    with pytest.raises(cpudist.OperationTimeoutError) as raised:
        waiting(tmp_path).wait(0.0)
    told = str(raised.value)
    assert told.startswith("resume: trainer 0 has not loaded or begun anything")
    assert "Every trainer has to call resume()" in told


def test_after_a_loss_it_is_trainer_0_that_is_missing(tmp_path):
    with pytest.raises(cpudist.OperationTimeoutError) as raised:
        waiting(tmp_path).wait(0.0, after_loss=True)
    told = str(raised.value)
    assert "If trainer 0 has ended, start its job again" in told
    assert "resume()" not in told


class Full(Files):
    """A disk without space, but for names; for so many tries."""

    def __init__(self, tries):
        self.tries = tries

    def write(self, file, contents):
        self.tries -= 1
        if self.tries >= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, contents)


def test_what_a_full_disk_refuses_is_written_once_there_is_room(tmp_path, caplog):
    way = waiting(tmp_path, files=Full(3), patience_s=60.0)
    with caplog.at_level(logging.WARNING):
        way.loaded(Begun("kept", 5))
    assert way.wait(0.0) == Begun("kept", 5)
    (told,) = [one.getMessage() for one in caplog.records]
    assert f"cannot write to {tmp_path}: No space left on device" in told
    assert "See that the directory exists" in told
    assert "tries again for 60 s (CPUDIST_REJOIN_S)" in told


@pytest.mark.parametrize("patience_s", [0.0, 0.3])
def test_a_disk_that_stays_full_is_an_error_when_the_time_is_over(patience_s, tmp_path):
    disk = Full(10**6)
    way = waiting(tmp_path, files=disk, patience_s=patience_s)
    match = "No space left" + (r".*tried for 0\.3 s" if patience_s else "")
    with pytest.raises(cpudist.SnapshotError, match=match):
        way.loaded(Begun("kept", 5))
    assert (disk.tries == 10**6 - 1) == (patience_s == 0.0)


def test_servers_that_go_again_end_the_wait_for_room(tmp_path):
    def check():
        raise cpudist.PeerLostError("server 0 was lost again")

    way = waiting(tmp_path, check, Full(10**6), patience_s=60.0)
    with pytest.raises(cpudist.PeerLostError, match="lost again"):
        way.loaded(Begun("kept", 5))


def test_what_has_failed_is_raised_though_the_others_cannot_be_told(tmp_path):
    def load():
        raise cpudist.SnapshotError("it is damaged")

    way = waiting(tmp_path, files=Full(10**6), patience_s=60.0)
    with pytest.raises(cpudist.SnapshotError, match="it is damaged"):
        way.begin(load)


def test_to_see_that_servers_mean_this_directory_needs_no_room(tmp_path):
    tokens = []

    def sees(token):
        tokens.append((token, Directory(tmp_path).sees(token)))
        return []

    way = waiting(tmp_path, files=Full(10**6))
    way.check(SimpleNamespace(use=lambda path: None, sees=sees))
    (found,) = tokens
    assert found[1]
    assert not list(tmp_path.iterdir())


class ReadOnly(Files):
    """A disk that has turned so: nothing goes any more."""

    def unlink(self, path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_values_do_not_change_while_they_are_told_to_be_there(tmp_path):
    way = waiting(tmp_path, files=ReadOnly())
    way.loading()  # there is nothing yet
    way.loaded(Begun("kept", 5))
    with pytest.raises(cpudist.SnapshotError, match=r"cannot remove .*: Read-only"):
        way.loading()
