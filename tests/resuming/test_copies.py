# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies to an object store: the newest, one at a time, beside everything else."""

from __future__ import annotations

import threading

import pytest
from patience import PATIENCE_S
from small_snapshots import commit

from torch_cpudist.resuming.copies import Copies
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory


class Slow:
    """A store that copies when it may."""

    url = "slow://store"

    def __init__(self):
        self.may, self.began = threading.Semaphore(0), threading.Semaphore(0)
        self.copied, self.fails = [], False

    def put(self, directory, name):
        self.began.release()
        assert self.may.acquire(timeout=PATIENCE_S)
        if self.fails:
            raise ConnectionError("it is away")
        self.copied.append(name)

    def keep(self, count, param_set):
        return []


def numbered(number):
    return names.snapshot_name(number, 7)


@pytest.fixture
def directory(tmp_path):
    made = Directory(tmp_path)
    for number in (1, 2, 3):
        commit(made, numbered(number), number=number, servers=1, trainers=1)
    commit(made, "mine", number=2, servers=1, trainers=1)
    return made


def test_those_that_wait_give_way_to_a_newer_one(directory):
    store = Slow()
    copies = Copies(store, directory, 1)
    assert copies.wait(0)
    copies.put(numbered(1), 0)
    assert store.began.acquire(timeout=PATIENCE_S)
    for name in (numbered(2), "mine", numbered(3)):
        copies.put(name, 0)
    assert copies.busy
    assert not copies.wait(0)
    assert copies.spared() == {numbered(1), "mine", numbered(3)}
    spared = copies.spared()
    assert directory.keep(1, spared=spared) == [numbered(2)]
    store.may.release(3)
    assert copies.wait(PATIENCE_S)
    assert store.copied == [numbered(1), "mine", numbered(3)]
    assert (copies.copied, copies.failed, copies.spared()) == (3, 0, set())
    assert copies.passed_over == 1
    assert directory.keep(1) == [numbered(1)]
    copies.close()


def test_what_fails_is_counted_and_can_be_asked_for(directory):
    store = Slow()
    store.fails = True
    copies = Copies(store, directory, 1)
    store.may.release(3)
    for name in (numbered(1), numbered(2)):
        copies.put(name, 0)
        assert copies.wait(PATIENCE_S)
    assert copies.failed_in_a_row == 2
    assert "it is away" in str(copies.error(numbered(2)))
    store.fails = False
    copies.put(numbered(2), 0)
    assert copies.wait(PATIENCE_S)
    assert (copies.copied, copies.failed, copies.failed_in_a_row) == (1, 2, 0)
    assert copies.error(numbered(2)) is None
    copies.close()
    copies.close()


def test_what_is_not_there_is_a_failed_copy(directory):
    copies = Copies(Slow(), directory, 1)
    copies.put("none", 0)
    assert (copies.failed, copies.busy, copies.spared()) == (1, False, set())
    assert "no snapshot 'none'" in str(copies.error("none"))
