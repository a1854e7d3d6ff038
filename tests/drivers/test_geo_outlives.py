# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Servers in a job of their own are lost and come back: Geo trainers go on.

Of each trainer all gradients are equal, so that values say how many were handed on.
"""

from __future__ import annotations

import pytest
import torch
from counting import ROWS
from own_jobs import own_jobs
from returning import (
    WAITS,
    Lives,
    at_a_barrier,
    check,
    flushed,
    lost_again_while_loading,
    until_back,
)
from snapshot_parity import seeing


def looked_far(opt, model, rank):
    """A lookup of rows that are on the servers only meets the loss."""
    with torch.no_grad():
        model.table(torch.arange(ROWS))


def counts(opt):
    """How many updates of each row this trainer has made."""
    found = opt.trained.tables[0].trained_rows()
    return dict(zip(found["rows"].tolist(), found["counts"].tolist(), strict=True))


def keeping_state(opt, model, rank):
    """Optimizer state of rows is as it was, but for the steps that come on top."""
    made = opt.stats()["steps"]
    assert counts(opt) == {rank: made}
    until_back(opt, model, rank)
    # A step that met the loss may have been made here before it was dropped, or not.
    more = opt.stats()["steps"] - made
    assert counts(opt).keys() == {rank}
    assert counts(opt)[rank] - made in (more - 1, more)


MEETS = [
    ("static", keeping_state),
    ("remote", keeping_state),
    ("dense", until_back),
    ("remote", looked_far),
    ("remote", flushed),
    ("static", flushed),
    ("static", at_a_barrier),
]


@pytest.mark.parametrize(("kind", "again"), MEETS)
def test_what_was_moved_since_the_snapshot_is_lost_to_the_step(kind, again, tmp_path):
    lives = Lives(kind, again=again, strategy="geo")
    with own_jobs(2, **seeing(tmp_path), **WAITS) as jobs:
        trainers = [jobs.trainer(name, lives.body) for name in "ab"]
        lives.wait(jobs)
        jobs.kill_server()
        lives.go[0].set()
        jobs.restart_server(**WAITS)
        check([one.result() for one in trainers])


@pytest.mark.parametrize("kind", ["static", "remote"])
def test_what_is_lost_twice_counts_once(kind, tmp_path):
    lives = Lives(kind, lives=3, again=until_back, strategy="geo")
    with own_jobs(2, **seeing(tmp_path), **WAITS) as jobs:
        trainers = [jobs.trainer(name, lives.body) for name in "ab"]
        for life in range(2):
            lives.wait(jobs)
            jobs.kill_server()
            jobs.restart_server(**WAITS)
            lives.go[life].set()
        check([one.result() for one in trainers], lost=11)


def test_servers_are_lost_again_while_values_are_loaded(tmp_path, monkeypatch):
    """The state of rows is from before the first loss."""
    lives = Lives("remote", again=keeping_state, strategy="geo")
    found = lost_again_while_loading(lives, tmp_path, monkeypatch)
    check(found)
    assert {one[2]["count"] for one in found} == {1}
