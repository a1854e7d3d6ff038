# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a step loses when another thread, or what follows the step, meets a loss."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.optimizer.outliving import Outliving

KEPT = 5  # the step of the snapshot that comes back


class Run:
    """Of one trainer whose servers are outlived as by ``Comeback``."""

    def __init__(self):
        self.trainer_rank = 1
        self.lock = threading.RLock()
        self.client = object()
        self.incarnation = 2
        self.environment = SimpleNamespace(apart=object())

    def trainer_client(self):
        return self.client

    def steady(self):
        return self.lock

    def outlive(self, error, client):
        self.go_on(self.made)

    def go_on(self, made, limit_s=1.0):
        """Servers are lost and have come back, ``made`` steps after the start."""
        with self.lock:
            self.outliving.let_go(made)
            self.client = MagicMock()
            if limit_s is None:
                self.outliving.learn_losses(self.client)
            self.outliving.go_on_with(self.client, limit_s)

    def rejoin(self, made):
        """They had counted this trainer as lost, so many steps after the start."""
        self.go_on(made, limit_s=None)


@pytest.fixture
def run():
    run = Run()
    run.handed, run.unapplied = 0, (0, 0)
    driver = SimpleNamespace(
        on_servers=MagicMock(),
        together="",
        renew=lambda: None,
        handed_on=lambda: run.handed,
        end=lambda carried_out: run.unapplied,
    )
    snapshots = MagicMock()
    snapshots.go_on_again.return_value = "kept", KEPT, 0.0
    snapshots.outlives.return_value = ""
    resumable = SimpleNamespace(snapshots=snapshots, resumed=lambda what: snapshots)
    run.there = driver.on_servers
    run.outliving = Outliving(run, driver, resumable)
    return run


def lost_updates(run):
    return run.outliving.stats()["recovered"]["lost_updates"]


def test_a_step_that_is_handed_on_while_another_thread_meets_the_loss_is_lost(run):
    """It goes into the queue of the servers that were lost, and is not dropped."""
    met = threading.Event()

    def lookup():
        met.set()
        run.go_on(8)

    other = threading.Thread(target=lookup, daemon=True)

    def hand_on():
        other.start()
        assert met.wait(PATIENCE_S)
        return 9

    assert run.outliving.step(9, hand_on, 8) == 9
    other.join(PATIENCE_S)
    assert not other.is_alive()
    run.outliving.end_step(lambda: None)
    assert lost_updates(run) == 9 - KEPT
    assert run.outliving.step(10, lambda: 10, 9) == 10
    assert lost_updates(run) == 9 - KEPT


def test_a_step_whose_gradients_are_of_lost_values_is_dropped(run):
    run.go_on(8)
    assert run.outliving.step(9, lambda: 9, 8) == 8
    run.go_on(8)  # another thread's, before the step has ended
    run.outliving.end_step(lambda: None)
    assert lost_updates(run) == 9 - KEPT


def test_after_a_loss_in_what_follows_a_step_none_is_said_to_be_dropped(run, caplog):
    tries = []

    def after():
        tries.append(run.client)
        if len(tries) == 1:
            raise cpudist.PeerLostError("server 0 was lost")

    run.made = 9
    with caplog.at_level(logging.WARNING):
        assert run.outliving.step(9, lambda: 9, 8) == 9
        run.outliving.end_step(after)
    assert len(tries) == 2
    assert "Lost are 4 updates" in caplog.text
    assert "the gradients of the step" not in caplog.text
    assert run.outliving.step(10, lambda: 10, 9) == 10
    assert lost_updates(run) == 9 - KEPT


def test_a_step_that_was_not_handed_on_is_named_and_dropped(run, caplog):
    def hand_on():
        raise cpudist.PeerLostError("server 0 was lost")

    run.made = 8
    with caplog.at_level(logging.WARNING):
        assert run.outliving.step(9, hand_on, 8) == 8
    assert "and the gradients of the step that it is in, 9." in caplog.text
    run.outliving.end_step(lambda: None)
    assert lost_updates(run) == 9 - KEPT


# -- this trainer is the lost one --------------------------------------------------


def recovered(run):
    found = run.outliving.stats()["recovered"]
    return [found[name] for name in ("rejoined", "lost_updates", "torn_updates")]


def test_what_was_handed_on_and_not_applied_is_lost(run, caplog):
    run.unapplied = 3, 2
    with caplog.at_level(logging.WARNING):
        run.rejoin(8)
    assert recovered(run) == [1, 3, 2]
    assert len(caplog.records) == 1
    assert "trainer 1, which servers had counted as lost, goes on" in caplog.text
    assert "as incarnation 2 with their values. Lost are 3 updates" in caplog.text
    assert "2 of them on some servers only or in part" in caplog.text
    assert "and the gradients of the step that it is in, 9." in caplog.text
    assert run.outliving.step(9, lambda: 9, 8) == 8  # dropped
    run.outliving.end_step(lambda: None)
    assert recovered(run) == [1, 4, 2]
    # Servers that come back with what was before that have lost these steps, too.
    run.go_on(11)
    assert lost_updates(run) == 11 - KEPT


def test_a_step_that_was_queued_before_it_failed_is_lost_once(run, caplog):
    """With a bound a step waits until it is applied, and is in the queue meanwhile."""
    run.unapplied = 1, 0

    def hand_on():
        run.handed += 1
        raise cpudist.PeerLostError("trainer 1 was lost")

    run.outlive = lambda error, client: run.rejoin(8)
    with caplog.at_level(logging.WARNING):
        assert run.outliving.step(9, hand_on, 8) == 8
    assert "the gradients of the step" not in caplog.text
    run.outliving.end_step(lambda: None)
    assert recovered(run) == [1, 1, 0]
    assert run.outliving.step(10, lambda: 10, 9) == 10


def test_a_step_that_was_applied_though_its_answer_was_lost_is_not(run):
    run.unapplied = 0, 0

    def hand_on():
        run.handed += 1
        raise cpudist.PeerLostError("trainer 1 was lost")

    run.outlive = lambda error, client: run.rejoin(8)
    assert run.outliving.step(9, hand_on, 8) == 8
    run.outliving.end_step(lambda: None)
    assert recovered(run) == [1, 0, 0]


def test_a_try_that_fails_counts_nothing_twice(run):
    """What the first one has learned of the queue, which has ended, stands."""
    run.unapplied = 3, 0
    run.there.begin_anew.side_effect = cpudist.PeerLostError("lost again")
    with pytest.raises(cpudist.PeerLostError):
        run.rejoin(8)
    run.there.begin_anew.side_effect = None
    run.unapplied = 0, 0
    run.rejoin(8)
    assert recovered(run) == [1, 3, 0]


def test_servers_that_have_let_go_of_the_values_are_not_filled_again(run):
    run.there.opened.holds_values.return_value = False
    with pytest.raises(cpudist.ClosedError, match="servers have let go of the values"):
        run.rejoin(8)
    assert recovered(run) == [0, 0, 0]
