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

    def trainer_client(self):
        return self.client

    def steady(self):
        return self.lock

    def outlive(self, error, client):
        self.go_on(self.made)

    def go_on(self, made):
        """Servers are lost and have come back, ``made`` steps after the start."""
        with self.lock:
            self.outliving.let_go(made)
            self.client = object()
            self.outliving.go_on_with(self.client, 1.0)


@pytest.fixture
def run():
    run = Run()
    driver = SimpleNamespace(on_servers=MagicMock(), together="", renew=lambda: None)
    snapshots = MagicMock()
    snapshots.go_on_again.return_value = "kept", KEPT, 0.0
    snapshots.outlives.return_value = ""
    resumable = SimpleNamespace(snapshots=snapshots, resumed=lambda what: snapshots)
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
