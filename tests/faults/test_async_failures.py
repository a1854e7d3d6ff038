# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Async where one torchrun starts servers and trainers: a loss ends the job."""

from __future__ import annotations

import signal

import pytest
from endings import lose_rank
from loss_cases import KILLED_S, LOSSES, check_loss, train_forever
from patience import PATIENCE_S

from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.processes

ASYNC = {"CPUDIST_STRATEGY": "async"}


def test_a_killed_colocated_rank_is_named_by_the_survivor():
    with ProcessRanks(train_forever, 2, variables=ASYNC) as ranks:
        for rank in range(2):
            ranks.expect(rank, "report", PATIENCE_S)
        lost_s = lose_rank(ranks, 1, signal.SIGKILL)
        entry = ranks.expect(0, "error", PATIENCE_S)
        check_loss(entry, lost_s, KILLED_S, r"(trainer|server) 1\b")


@pytest.mark.parametrize(("number", "clocks", "limit_s"), LOSSES)
def test_a_lost_trainer_ends_serve_and_with_it_the_others(number, clocks, limit_s):
    variables = ASYNC | clocks
    with ProcessRanks(train_forever, 3, servers=1, variables=variables) as ranks:
        for rank in (1, 2):
            ranks.expect(rank, "report", PATIENCE_S)
        ranks.expect(0, "serving", PATIENCE_S)
        lost_s = lose_rank(ranks, 2, number)
        for rank in (0, 1):
            entry = ranks.expect(rank, "error", PATIENCE_S)
            check_loss(entry, lost_s, limit_s, r"trainer 1\b")
