# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``init()`` waits for in the core ends with its time."""

from __future__ import annotations

import contextlib
import threading

import pytest
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.launch.start_guard import StartGuard


class Wait:
    """Something that waits until it is ended."""

    def __init__(self):
        self._over = threading.Event()
        self.reasons = []

    def end(self, reason):
        self.reasons.append(reason)
        self._over.set()

    def wait(self):
        assert self._over.wait(PATIENCE_S)
        raise cpudist.ClosedError("it was ended")


def wait_for_all(waits, remaining_s, missing, lost=None):
    with StartGuard(remaining_s, missing, lost) as guard:
        for wait in waits:
            guard.ends(wait.end)
            with contextlib.suppress(cpudist.ClosedError):
                wait.wait()


def test_a_wait_that_is_too_long_is_ended_and_says_what_is_missing():
    wait = Wait()
    with pytest.raises(cpudist.OperationTimeoutError, match="trainer 3 is late"):
        wait_for_all([wait], 0.0, "trainer 3 is late")
    assert ["trainer 3 is late" in reason for reason in wait.reasons] == [True]


def test_what_is_waited_for_when_the_time_is_over_is_ended_too():
    waits = Wait(), Wait()
    with pytest.raises(cpudist.OperationTimeoutError, match="nobody came"):
        wait_for_all(waits, 0.0, "nobody came")
    assert [len(wait.reasons) for wait in waits] == [1, 1]


def test_who_is_in_time_is_left_alone():
    wait = Wait()
    with StartGuard(PATIENCE_S, "nothing") as guard:
        guard.ends(wait.end)
    assert wait.reasons == []


def lose_trainer():
    with StartGuard(PATIENCE_S, "nothing"):
        raise cpudist.PeerLostError("trainer 1 was lost")


def test_an_error_of_its_own_stays():
    with pytest.raises(cpudist.PeerLostError, match="trainer 1"):
        lose_trainer()


def test_a_wait_in_vain_is_ended_at_once_with_the_name_of_who_is_lost():
    wait = Wait()
    lost = cpudist.PeerLostError("rank 3 has ended")
    answers = iter([None, None, lost])
    with pytest.raises(cpudist.PeerLostError, match="rank 3 has ended"):
        wait_for_all([wait], 2 * PATIENCE_S, "nothing", lambda: next(answers))
    assert wait.reasons == ["rank 3 has ended"]


def test_what_asks_a_store_that_does_not_answer_holds_nobody_up():
    answered = threading.Event()

    def ask():
        assert answered.wait(PATIENCE_S)

    with pytest.raises(cpudist.OperationTimeoutError, match="nobody came"):
        wait_for_all([Wait()], 0.0, "nobody came", ask)
    answered.set()
