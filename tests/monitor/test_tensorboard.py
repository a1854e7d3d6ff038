# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scalars of TensorBoard: those of the pages, read back with its own package."""

from __future__ import annotations

import sys

import pytest
from lazily import Lazily
from monitor_cases import trainable
from sync_cases import ONE_THREAD, Batches, loss_of

import torch_cpudist as cpudist
from torch_cpudist.monitor import TensorBoardWriter

EVENTS = Lazily("tensorboard.backend.event_processing.event_accumulator")
STEPS = 6


class Noted:
    """Stands where a SummaryWriter of the user's is."""

    def __init__(self):
        self.found = {}

    def add_scalar(self, tag, value, step):
        self.found.setdefault(tag, []).append((step, value))


@pytest.fixture
def train():
    """Trains a world of one, with a writer to this place."""

    def run(where, **options):
        model, optimizer = trainable("sync")
        batches = Batches(1, steps=STEPS)
        with TensorBoardWriter(where, **options) as writer:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, batches.part(step, 0)).backward()
                optimizer.step(samples=5)
                writer.step()
        with pytest.raises(cpudist.ClosedError):
            writer.step()
        return optimizer.stats()

    cpudist.init(variables=ONE_THREAD)
    yield run
    cpudist.shutdown()


@pytest.mark.processes
def test_figures_are_those_of_the_page_per_second(train):
    noted = Noted()
    stats = train(noted, every_steps=2)
    steps = noted.found["cpudist/steps/0"]
    assert [step for step, _ in steps] == [2, 4, 6]
    for (_, pace), (_, samples) in zip(
        steps, noted.found["cpudist/samples/0"], strict=True
    ):
        assert samples == pytest.approx(5 * pace)
        assert pace > 0
    # Two steps each: their seconds are 2 / pace.
    sent = noted.found["cpudist/bytes/sent"]
    total = sum(
        value * 2 / pace for (_, value), (_, pace) in zip(sent, steps, strict=True)
    )
    assert 0 < total <= stats["bytes_sent"] * (1 + 1e-9)
    shares = noted.found["cpudist/step_seconds/0"]
    assert all(0 < share <= 1 for _, share in shares)
    rows = noted.found["cpudist/table_rows/bag.weight/0"]
    assert rows[-1] == (6, 30)
    assert "cpudist/rank_info" not in "".join(noted.found)


@pytest.mark.processes
def test_the_loop_may_say_which_step_it_is():
    noted = Noted()
    cpudist.init(variables=ONE_THREAD)
    trainable("async")
    writer = TensorBoardWriter(noted, every_steps=10)
    for step in (100, 101, 110):
        writer.step(step)
    writer.close()
    writer.close()
    cpudist.shutdown()
    assert [step for step, _ in noted.found["cpudist/steps/0"]] == [100, 110]


@pytest.mark.processes
def test_a_counter_that_was_not_there_before_has_no_pace_yet():
    """Nobody knows since when it has counted: one that was resumed, say."""
    noted = Noted()
    cpudist.init(variables=ONE_THREAD)
    writer = TensorBoardWriter(noted, every_steps=1)
    model, optimizer = trainable("sync")
    batches = Batches(1, steps=2)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batches.part(step, 0)).backward()
        optimizer.step()
        writer.step()
    writer.close()
    cpudist.shutdown()
    assert [step for step, _ in noted.found["cpudist/steps/0"]] == [2]


@pytest.mark.integrations
@pytest.mark.processes
def test_its_own_package_reads_what_was_written(train, tmp_path):
    pytest.importorskip("tensorboard")
    train(tmp_path, every_steps=3)
    events = EVENTS.EventAccumulator(str(tmp_path / "rank0"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"cpudist/steps/0", "cpudist/samples/0", "cpudist/bytes/sent"} <= set(tags)
    steps = events.Scalars("cpudist/steps/0")
    samples = events.Scalars("cpudist/samples/0")
    assert [one.step for one in steps] == [3, 6]
    for pace, one in zip(steps, samples, strict=True):
        assert one.value == pytest.approx(5 * pace.value, rel=1e-5)
    (rows, _) = events.Scalars("cpudist/table_rows/bag.weight/0")
    assert rows.value == 30


@pytest.mark.processes
def test_what_cannot_be_is_said(monkeypatch, tmp_path):
    with pytest.raises(cpudist.InvalidArgumentError, match="every_steps"):
        TensorBoardWriter(tmp_path, every_steps=0)
    cpudist.init(variables=ONE_THREAD)
    with pytest.raises(cpudist.InvalidArgumentError, match="found int"):
        TensorBoardWriter(3)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(cpudist.BackendUnavailableError, match="extra 'tensorboard'"):
        TensorBoardWriter(tmp_path)
    cpudist.shutdown()
