# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A batch that one trainer skips without a step is told of at the next barrier."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist


def trained(
    caplog: pytest.LogCaptureFixture,
    steps: dict[int, int],
    strategy: Any = None,
    *,
    skips_by_step: bool = False,
    leaves: bool = False,
    rounds: int = 1,
) -> list[str]:
    """Warnings of trainers that take so many steps between barriers."""
    most = max(steps.values())

    def body(context: cpudist.Context) -> None:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model, strategy)
        for _ in range(rounds):
            for step in range(most):
                opt.zero_grad()
                skip = step >= steps[context.trainer_rank]
                if skip and skips_by_step:
                    opt.step(samples=0)
                elif not skip:
                    model(torch.ones(3, 2)).mean().backward()
                    opt.step(samples=3)
            if leaves and steps[context.trainer_rank] < most:
                opt.leave()
            cpudist.barrier()
        opt.close()
        cpudist.barrier()

    with caplog.at_level(logging.WARNING, logger="torch_cpudist"):
        run(body, len(steps))
    return [r.getMessage() for r in caplog.records if "numbers of steps" in r.message]


@pytest.mark.parametrize("fewer", [0, 1])
def test_a_skipped_batch_is_told_with_both_counts(
    caplog: pytest.LogCaptureFixture, fewer: int
) -> None:
    (text,) = trained(caplog, {fewer: 3, 1 - fewer: 5}, rounds=3)  # once
    found = {fewer: 3, 1 - fewer: 5}
    assert f": trainer 0 {found[0]}, trainer 1 {found[1]}. " in text
    assert f"If trainer {fewer} skipped batches" in text
    assert "opt.step(samples=0)" in text
    assert "opt.leave()" in text


def test_skipping_as_said_and_equal_counts_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert trained(caplog, {0: 3, 1: 5}, skips_by_step=True, rounds=2) == []
    assert trained(caplog, {0: 4, 1: 4}, rounds=3) == []


def test_who_says_that_it_has_left_has_fewer_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert trained(caplog, {0: 5, 1: 3}, leaves=True, rounds=2) == []


def test_three_trainers_name_those_with_fewer(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = trained(caplog, {0: 2, 1: 4, 2: 3})
    assert "trainer 0 2, trainer 1 4, trainer 2 3" in text
    assert "If trainer 0, trainer 2 skipped" in text


def test_only_trainers_of_one_group_meet_in_rounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    apart = cpudist.HalfAsync(group=[[0], [1]])
    assert trained(caplog, {0: 2, 1: 4}, apart) == []
    together = cpudist.HalfAsync(group=[[0, 1], [2]])
    (text,) = trained(caplog, {0: 2, 1: 4, 2: 1}, together)
    assert ": trainer 0 2, trainer 1 4. " in text


@pytest.mark.parametrize("strategy", [cpudist.Async(), cpudist.Geo()], ids=str)
def test_strategies_without_rounds_are_not_told(
    caplog: pytest.LogCaptureFixture, strategy: cpudist.Async
) -> None:
    assert trained(caplog, {0: 2, 1: 4}, strategy) == []


def test_a_trainer_that_is_gone_keeps_nobody_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(context: cpudist.Context) -> None:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model)
        for _ in range(1 + context.trainer_rank):
            opt.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
            opt.step()
        if context.trainer_rank == 0:
            context.shutdown()
            return
        cpudist.barrier()

    with caplog.at_level(logging.WARNING, logger="torch_cpudist"):
        run(body, 3)
    (text,) = (r.getMessage() for r in caplog.records if "of steps" in r.message)
    assert ": trainer 1 2, trainer 2 3. " in text
