# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Async where one torchrun starts servers and trainers: a loss ends the job."""

from __future__ import annotations

import signal

import pytest
from test_failures import KILLED_S, START_S, STOPPED_S, check_loss, train_forever

from torch_cpudist.testing import ProcessRanks

ASYNC = {"CPUDIST_STRATEGY": "async"}
SIGNALS = [(signal.SIGKILL, KILLED_S), (signal.SIGSTOP, STOPPED_S)]


def test_a_killed_colocated_rank_is_named_by_the_survivor():
    number, limit_s = SIGNALS[0]
    with ProcessRanks(train_forever, 2, variables=ASYNC) as ranks:
        for rank in range(2):
            ranks.expect(rank, "report", START_S)
        lost_s = ranks.signal(1, number)
        entry = ranks.expect(0, "error", limit_s + 5)
        check_loss(entry, lost_s, limit_s, r"server 1\b")


@pytest.mark.parametrize(("number", "limit_s"), SIGNALS)
def test_a_lost_trainer_ends_serve_and_with_it_the_others(number, limit_s):
    with ProcessRanks(train_forever, 3, servers=1, variables=ASYNC) as ranks:
        for rank in (1, 2):
            ranks.expect(rank, "report", START_S)
        ranks.expect(0, "serving", START_S)
        lost_s = ranks.signal(2, number)
        for rank in (0, 1):
            entry = ranks.expect(rank, "error", limit_s + 5)
            check_loss(entry, lost_s, limit_s, r"trainer 1\b")
