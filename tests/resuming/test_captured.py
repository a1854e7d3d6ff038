# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Marks that others did not come to: how long none is made, which are given again."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S

from torch_cpudist.drivers.saving import CutAnswer
from torch_cpudist.resuming.captured import Captured
from torch_cpudist.resuming.saves import Save
from torch_cpudist.resuming.schedules import Schedules
from torch_cpudist.snapshot.directory import Directory


@pytest.mark.parametrize(("waited_s", "rests_s"), [(10.0, 200.0), (0.1, 0.0)])
def test_after_a_wait_in_vain_nobody_is_kept_for_a_while(waited_s, rests_s):
    told = []
    captured = Captured(
        SimpleNamespace(together=False),
        lambda: SimpleNamespace(skip=told.append),
        None,
        Schedules({}),
        None,
        rank=1,
    )
    now = time.monotonic()
    captured.add(Save(3, 9, {}, now - waited_s, whole=True, base=None, name=""))
    assert not captured.rests(now)
    captured.answered(CutAnswer(3, False, "", "no marker in time from trainers 2"))
    assert told == ["no marker in time from trainers 2"]
    assert not captured
    assert captured.rests(now + 0.95 * rests_s) == (rests_s > 0)
    # An hour more than a slow machine takes from one line to the next.
    assert not captured.rests(now + 20 * (waited_s + 3600) + 1)


def made(rank=1, directory=None):
    """One of a trainer, and what it has told of snapshots that are not taken."""
    told, gone = [], []
    captured = Captured(
        SimpleNamespace(together=False, abandon=gone.append),
        lambda: SimpleNamespace(skip=told.append),
        None,
        Schedules({}),
        directory,
        rank=rank,
    )
    return captured, told, gone


def test_what_is_taken_back_waits_to_be_marked_again():
    captured, told, gone = made()
    save = Save(3, 9, {}, time.monotonic() - 50.0, until=time.monotonic() + 1e6)
    captured.add(save)
    captured.answered(CutAnswer(3, False, "", "late", again=True))
    assert captured.again is save
    assert not captured
    assert (told, gone) == ([], [])
    assert not captured.rests(time.monotonic())
    captured.add(Save(3, 12, {}, time.monotonic()))
    assert captured.again is None


def test_a_cut_that_is_torn_is_given_up_by_who_knows_it():
    captured, told, gone = made()
    captured.add(Save(3, 9, {}, time.monotonic(), until=time.monotonic() + 1e6))
    captured.answered(CutAnswer(3, False, "", "late", torn=True))
    assert captured.again is None
    assert (told, gone) == (["late"], [3])


def test_no_rest_follows_where_nobody_was_kept():
    captured, told, _ = made()
    now = time.monotonic()
    captured.add(Save(3, 9, {}, now - 900.0, until=now))
    captured.answered(CutAnswer(3, False, "", "no marker in time from trainers 2"))
    assert len(told) == 1
    assert not captured.rests(time.monotonic())


def test_what_servers_do_not_even_ask_for_is_counted_and_goes(tmp_path):
    captured, told, gone = made(rank=0, directory=Directory(tmp_path))
    (tmp_path / "snap-3").mkdir()
    captured.answered(CutAnswer(3, False, "snap-3", "still written", unmarked=True))
    assert (told, gone) == (["still written"], [3])
    assert not (tmp_path / "snap-3").exists()


def test_a_server_that_is_asked_about_an_answer_keeps_no_step():
    """The thread that writes asks; who steps goes on, and finds it answered then."""
    asked, may = threading.Event(), threading.Event()
    answers = [CutAnswer(3, False, "", "late")]

    def answer():
        if not answers:
            return None
        asked.set()
        assert may.wait(PATIENCE_S)
        return answers.pop()

    told = []
    captured = Captured(
        SimpleNamespace(together=False, answer=answer),
        lambda: SimpleNamespace(skip=told.append),
        None,
        Schedules({}),
        None,
        rank=1,
    )
    captured.add(Save(3, 9, {}, time.monotonic()))
    writer = threading.Thread(target=captured.look)
    writer.start()
    assert asked.wait(PATIENCE_S)
    captured.take_answers(wait=False)
    captured.step_begins()
    captured.add(Save(4, 10, {}, time.monotonic()))
    assert [save.number for save in captured.all()] == [3, 4]
    assert told == []
    may.set()
    captured.take_answers()  # behind the other thread, which has gone on with it
    assert told == ["late"]
    assert [save.number for save in captured.all()] == [4]
    writer.join(PATIENCE_S)
