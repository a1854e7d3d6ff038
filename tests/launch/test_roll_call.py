# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who counts as ended while ranks meet, and who does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from patience import PATIENCE_S
from torch._C._distributed_c10d import HashStore

from torch_cpudist.launch.layout import Member
from torch_cpudist.launch.roll_call import RollCall
from torch_cpudist.machine import processes
from torch_cpudist.machine.processes import Process

RUN = 7


class Other:
    """A process that does nothing, until it is killed."""

    def __init__(self):
        self._program = subprocess.Popen(
            [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
        )
        own, _, _ = processes.own().rpartition("/")
        space, _, _ = own.rpartition("/")
        with open(f"/proc/{self._program.pid}/stat") as stat:
            ticks = stat.read().rpartition(")")[2].split()[19]
        self.named = f"{space}/{self._program.pid}/{ticks}"
        self.pid = self._program.pid

    def kill(self):
        self._program.send_signal(signal.SIGKILL)
        with Process(self.named) as seen:
            assert seen.has_ended(PATIENCE_S)

    def reap(self):
        self._program.kill()
        self._program.wait(PATIENCE_S)
        self._program.stdin.close()


@pytest.fixture
def other():
    made = Other()
    yield made
    made.reap()


def members(*named):
    return [
        Member(rank, rank, 0, "default", "host", f"host pid {rank}", {}, process=one)
        for rank, one in enumerate(named)
    ]


def roll(store=None, own=0):
    return RollCall(store or HashStore(), own)


def test_a_process_is_seen_to_end_before_anybody_has_waited_for_it(other):
    with Process(other.named) as seen:
        assert seen.known
        assert not seen.has_ended()
        other.kill()
        assert seen.has_ended()
    with Process(other.named) as late:
        assert late.has_ended()
    other.reap()
    with Process(other.named) as gone:
        assert gone.has_ended()


def test_a_number_that_another_process_has_now_is_none_of_it():
    space, _, _ = processes.own().rpartition("/")
    space, _, _ = space.rpartition("/")
    parent = f"{space}/{os.getppid()}"
    with Process(f"{parent}/1") as earlier:
        assert earlier.has_ended()
    with Process(f"another/{os.getppid()}/1") as elsewhere:
        assert not elsewhere.known
        assert not elsewhere.has_ended()


@pytest.mark.parametrize("named", ["", "a", "a/b/c", f"x/{2**70}/1", "/-1/2"])
def test_of_what_nobody_has_named_nothing_is_known(named):
    with Process(named) as found:
        assert not found.known
        assert not found.has_ended()


def test_this_process_itself_never_ends():
    with Process(processes.own()) as own:
        assert not own.known


def test_who_ends_is_named_to_all(other):
    store = HashStore()
    first, second = roll(store, 0), roll(store, 1)
    told = members(processes.own(), "elsewhere", other.named)
    first.begin(RUN, told, certain=True)
    second.begin(RUN, members("", "", ""), certain=True)  # on another host
    assert first.look() is None
    assert second.look() is None
    other.kill()
    assert "rank 2 (host pid 2) has ended" in str(first.look())
    said = None
    while said is None:  # asked for a few times a second
        said = second.look()
    assert str(said) == str(first.look())
    first.end()
    second.end()


def test_what_came_first_is_the_cause(other):
    store = HashStore()
    store.set(f"torch_cpudist/{RUN}/ended", "rank 1 (host pid 1) has ended")
    made = roll(store)
    made.begin(RUN, members("", "", other.named), certain=True)
    other.kill()
    assert "rank 1 (" in str(made.look())
    made.end()


def test_whoever_was_through_may_end(other):
    store = HashStore()
    through = roll(store, 1)
    through.begin(RUN, members("", ""), certain=True)
    through.come_in()
    made = roll(store)
    made.begin(RUN, members("", other.named), certain=True)
    other.kill()
    assert made.look() is None
    made.end()


def test_what_an_earlier_run_has_left_is_no_end_of_this_one(other):
    other.kill()
    made = roll()
    made.begin(RUN, members("", other.named), certain=False)
    assert made.look() is None
    made.begin(RUN, members("", other.named), certain=True)
    assert "rank 1 (" in str(made.look())
    made.end()
    assert roll().look() is None


def test_the_end_of_rank_0_is_why_its_store_has_failed(other):
    made = roll(own=1)
    made.begin(RUN, members(other.named, ""), certain=True)
    other.kill()
    assert "rank 0 (host pid 0) has ended" in str(made.after_failure())
    made.end()
    assert roll(own=1).after_failure() is None


class FailedStore:
    """Of a rank 0 that has ended."""

    def check(self, keys):
        raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("asked", ["look", "after_failure"])
def test_all_are_named_where_rank_0_has_ended_too(other, asked):
    """It may have ended because of the other, and its store can say so no more."""
    second = Other()
    try:
        made = roll(FailedStore(), own=2)
        made.begin(RUN, members(other.named, second.named, ""), certain=True)
        second.kill()
        other.kill()
        text = str(getattr(made, asked)())
        assert "rank 0 (host pid 0) and rank 1 (host pid 1) have ended" in text
        made.end()
    finally:
        second.reap()
