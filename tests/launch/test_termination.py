# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who has SIGTERM when: this package never takes it from others, and gives it back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading

import pytest
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.launch.wanted_saves import WantedSaves
from torch_cpudist.resuming.wanted import Wanted
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory

ONE_THREAD = {"CPUDIST_THREADS": "1"}


def handler():
    return signal.getsignal(signal.SIGTERM)


@contextlib.contextmanager
def started(**variables):
    context = cpudist.init(variables={**ONE_THREAD, **variables})
    try:
        yield context
    finally:
        context.abort("the test is over")


def wakeup_fd():
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


def test_it_is_there_from_init_to_the_end_and_then_as_before():
    assert handler() is signal.SIG_DFL
    for _ in range(2):
        with started():
            assert callable(handler())
            assert wakeup_fd() != -1
        assert handler() is signal.SIG_DFL
        assert wakeup_fd() == -1


def test_zero_leaves_it_alone():
    with started(CPUDIST_GRACE_S="0"):
        assert handler() is signal.SIG_DFL
        assert wakeup_fd() == -1


def test_a_handler_that_is_there_stays():
    called = []
    signal.signal(signal.SIGTERM, lambda *_: called.append(1))
    try:
        with started():
            signal.raise_signal(signal.SIGTERM)
            assert wakeup_fd() == -1
        assert called == [1]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_who_has_the_wake_up_of_python_keeps_it():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        signal.set_wakeup_fd(ours.fileno())
        try:
            with started():
                assert handler() is signal.SIG_DFL
                assert wakeup_fd() == ours.fileno()
        finally:
            signal.set_wakeup_fd(-1)


def test_a_handler_that_was_set_later_stays_and_may_be_taken_away():
    """Lightning's does so: it calls the one from before, and puts it back."""
    with started():
        before = handler()
        signal.signal(signal.SIGTERM, lambda *_: None)
        theirs = handler()
    assert handler() is theirs
    signal.signal(signal.SIGTERM, before)
    status = in_a_fork(lambda: signal.raise_signal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Of a run that is over it does what nobody's handler does.
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_handler_put_back_after_its_run_is_in_nobodys_way():
    """As a Trainer does, which saves handlers during a run and is done after it."""
    with started():
        saved = handler()
    signal.signal(signal.SIGTERM, saved)
    try:
        with started():
            assert handler() != saved
        assert handler() is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_that_is_set_later_decides_alone():
    """Also where it calls the one from before: nothing ends but what it ends."""
    called = []
    with started() as context:
        before = handler()

        def later(number, frame):
            called.append(number)
            before(number, frame)

        signal.signal(signal.SIGTERM, later)
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM]
        # What is read before this is what the signal has left.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        context.barrier()
    assert not any(
        thread.name == "cpudist-sigterm" and thread.is_alive()
        for thread in threading.enumerate()
    )


def in_a_fork(do):
    """What ``waitpid`` says of a child that has done it; its errors are status 1."""
    pid = os.fork()
    if pid == 0:
        try:
            do()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_forked_child_has_none_and_tells_the_parent_nothing():
    def look():
        assert handler() is signal.SIG_DFL
        assert wakeup_fd() == -1
        signal.raise_signal(signal.SIGTERM)

    with started() as context:
        status = in_a_fork(look)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert "cpudist-sigterm" in {t.name for t in threading.enumerate()}
        assert not context.closed
        cpudist.barrier()


def test_a_handler_put_back_in_a_forked_child_ends_that():
    """As one does that saved it before the fork; it has no pipe to tell there."""
    with started():
        saved = handler()

        def put_back():
            signal.signal(signal.SIGTERM, saved)
            signal.raise_signal(signal.SIGTERM)

        status = in_a_fork(put_back)
        assert os.WTERMSIG(status) == signal.SIGTERM
        cpudist.barrier()


def test_a_run_that_another_thread_has_ended_is_no_obstacle():
    with started() as context:
        thread = threading.Thread(target=context.abort, args=("ended elsewhere",))
        thread.start()
        thread.join(PATIENCE_S)
        assert callable(handler())  # only the main thread can give it back
    with started():
        assert callable(handler())
    assert handler() is signal.SIG_DFL


@pytest.mark.parametrize("text", ["-1", "soon", str(2**40)])
def test_no_such_grace(text):
    with pytest.raises(cpudist.ConfigurationError, match="CPUDIST_GRACE_S"):
        cpudist.init(variables={"CPUDIST_GRACE_S": text})


# -- what servers want before they end ---------------------------------------------

RUN = 77


@pytest.fixture
def begun(tmp_path):
    """A directory where optimizers 0 and 2 have begun, and one of another run."""
    for name in (
        names.begun_name(RUN, 0),
        names.begun_name(RUN, 2),
        names.begun_name(RUN + 1, 1),
    ):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_servers_ask_those_that_save_and_see_when_all_have(begun):
    one, other = WantedSaves(begun, RUN), WantedSaves(begun, RUN)
    trainer = WantedSaves(begun, RUN)
    assert not trainer.wanted(0)
    assert one.ask() == other.ask() == [0, 2]
    assert [trainer.wanted(number) for number in range(3)] == [True, False, True]
    trainer.answer(0)
    assert not one.answered()
    trainer.answer(2)
    assert one.answered()
    assert other.answered()
    one.ask()
    one.withdraw()
    assert not trainer.wanted(0)


def test_nobody_is_asked_where_nobody_saves(tmp_path):
    assert WantedSaves(tmp_path, RUN).ask() == []
    assert WantedSaves(tmp_path / "none", RUN).ask() == []


@pytest.fixture
def wanted(begun, monkeypatch):
    """Trainer 0's, which looks at every step, and what servers have asked for."""
    monkeypatch.setattr("torch_cpudist.resuming.wanted.LOOK_S", 0.0)
    files = WantedSaves(begun, RUN)
    one = Wanted(Directory(begun), RUN, 0)
    assert not one.due(idle=True, saved=5)
    files.ask()
    return one, files


def test_one_that_is_being_written_does_not_do(wanted):
    one, files = wanted
    assert not one.due(idle=False, saved=5)
    assert one.due(idle=True, saved=6)
    assert not one.due(idle=False, saved=6)
    assert files.wanted(0)
    assert not one.due(idle=True, saved=7)
    assert not files.wanted(0)
    assert not one.due(idle=True, saved=7)


def test_one_that_came_to_nothing_is_begun_again(wanted):
    one, files = wanted
    assert one.due(idle=True, saved=5)
    assert one.due(idle=True, saved=5)
    assert not one.due(idle=False, saved=5)
    assert not one.due(idle=True, saved=6)
    assert not files.wanted(0)
