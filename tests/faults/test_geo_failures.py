# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo when trainers are killed, come back, come late and leave early."""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import functools
import signal

import pytest
from endings import lose_rank
from group_fixtures import groups, steps_of  # noqa: F401
from loss_cases import KILLED_S, check_loss, train_forever
from patience import PATIENCE_S
from train_groups import MANY, Training

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.processes

# Exchanges end with the step after their answers.
GEO = cpudist.Geo(push_every=2, exchange_budget=1.0)
OUTER = cpudist.Geo(push_every=2, exchange_budget=1.0, outer={"lr": 1.0})
# Halves of whole numbers, over and over.
ROUNDING = 1e-3


class Exchanging(Training):
    """Tells once that two exchanges have ended: the servers have what it moved."""

    def __init__(self, folder, name, strategy, report):
        super().__init__(folder, name, strategy)
        self._report = report

    def step(self, flush=True):
        super().step(flush)
        if self._report and self.optimizer.stats()["exchange"]["exchanges"] >= 2:
            self._report("exchanged")
            self._report = None


def train(folder, name, strategy, steps, pause_s, context, report):
    """Trains, leaves, and tells its rank and its first and last values."""
    training = Exchanging(folder, name, strategy, report)
    began = training.weights()
    training.train(steps, pause_s, flush=False)
    training.optimizer.leave()
    training.optimizer.flush()
    return [context.trainer_rank, began, training.weights()]


@pytest.fixture
def trainer(groups, tmp_path):
    def start(name, strategy=GEO, steps=MANY, pause_s=0.005, **variables):
        body = functools.partial(train, tmp_path, name, strategy, steps, pause_s)
        return groups.start("trainer", body, **variables)

    return start


def test_a_killed_trainer_loses_its_own_movement_and_nobody_elses(
    groups, trainer, steps_of, tmp_path
):
    """The others go on; it comes back to the servers' values; a third one joins."""
    servers = groups.servers(ranks=1)
    job = {"TORCHELASTIC_RUN_ID": "victims"}
    steady, victim = trainer("steady"), trainer("victim", **job)
    for one in (steady, victim):
        one.expect(0, "report", PATIENCE_S)
    lose_rank(victim, 0, signal.SIGKILL)
    written = steps_of("victim")
    late, _, values = trainer("late", steps=5).expect(0, "result", PATIENCE_S)["value"]
    assert values[late] == pytest.approx(5, abs=ROUNDING)
    again = trainer("victim", steps=written + 6, **job)
    who, began, values = again.expect(0, "result", PATIENCE_S)["value"]
    # Of what it had moved only what was handed on: some, and not all with two trainers.
    assert 0 < began[who] < written + 1
    assert values[who] == pytest.approx(began[who] + 6, abs=ROUNDING)
    (tmp_path / "stop").touch()
    mine, _, values = steady.expect(0, "result", PATIENCE_S)["value"]
    assert servers.expect(0, "result", PATIENCE_S)["value"] is None
    assert {mine, who, late} == {0, 1, 2}
    assert values[mine] == pytest.approx(steps_of("steady"), abs=ROUNDING)
    assert values[late] == pytest.approx(5, abs=ROUNDING)
    assert values[who] == pytest.approx(began[who] + 6, abs=ROUNDING)
    # Rows and the dense element came in the same messages.
    assert values[8] == pytest.approx(sum(values[:8]), abs=ROUNDING)


def test_a_killed_trainer_ends_the_others_with_an_outer_optimizer(
    groups, trainer, steps_of
):
    """An outer step takes the movement of every trainer of the start."""
    groups.servers(ranks=1)
    victim, other = (trainer(name, OUTER) for name in "ab")
    for name in "ab":
        steps_of(name, 10)
    lost_s = lose_rank(victim, 0, signal.SIGKILL)
    entry = other.expect(0, "error", PATIENCE_S)
    check_loss(entry, lost_s, KILLED_S, r"trainer \d \(")


@pytest.mark.parametrize("servers", [0, 1])
def test_in_one_job_a_killed_trainer_is_told_without_an_exchange(servers):
    """Steps that ask nobody learn of it all the same."""
    variables = {"CPUDIST_STRATEGY": "geo", "CPUDIST_GEO_PUSH_EVERY": "1000000"}
    count = 2 + servers
    with ProcessRanks(
        train_forever, count, servers=servers, variables=variables
    ) as ranks:
        for rank in range(servers, count):
            ranks.expect(rank, "report", PATIENCE_S)
        lost_s = lose_rank(ranks, count - 1, signal.SIGKILL)
        entry = ranks.expect(servers, "error", PATIENCE_S)
        check_loss(entry, lost_s, KILLED_S, r"(trainer|server) 1\b")
