# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's averages of weights, of models with tables, under every strategy."""

from __future__ import annotations

import threading

import pytest
import torch
from patience import PATIENCE_S
from sync_cases import ONE_THREAD, RULES, Batches, Model, loss_of, run
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from weight_readers import STRATEGIES, averages, averages_of_processes

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("strategy", ["sync", "async", "halfasync", "geo"])
def test_an_average_of_weights_is_one_of_current_rows(strategy, trainers):
    meeting = threading.Barrier(trainers)

    def body(context):
        def meet():
            meeting.wait(PATIENCE_S)

        return averages(context, STRATEGIES[strategy], meet)

    for found in run(body, trainers, variables=ONE_THREAD):
        # Late gradients may carry weights far, where a float32 has fewer digits left.
        assert found["worst"] <= 1e-6 * max(1.0, found["moved"])
        assert found["moved"] > 0.01


@pytest.mark.processes
@pytest.mark.parametrize("trainers", [1, 2])
def test_an_average_of_weights_under_collectives(trainers):
    with ProcessRanks(averages_of_processes, trainers, variables=ONE_THREAD) as ranks:
        results = ranks.results(PATIENCE_S)
    for found in results:
        assert len(found) == 4
        for strategy, one in found.items():
            assert one["worst"] <= 1e-5, strategy
            assert one["moved"] > 0.01, strategy


def test_an_average_is_that_of_one_process():
    """torch's own average of plain torch's training on the joined batches."""
    batches = Batches(2, steps=20)

    def average(model, optimizer, part):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(20):
            optimizer.zero_grad()
            loss_of(model, part(step)).backward()
            optimizer.step()
            averaged.update_parameters(model)
        return [p.detach() for p in averaged.module.parameters()]

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            RULES["sgd"].dense(model.parameters()), model
        )
        rank = context.trainer_rank
        return average(model, optimizer, lambda step: batches.part(step, rank))

    plain = Model(torch.float64)
    plain.bag.double()
    joined = [tuple(batches.joined(step)) for step in range(20)]
    double = [(ids, dense.double(), target.double()) for ids, dense, target in joined]
    wanted = average(
        plain, RULES["sgd"].dense(plain.parameters()), lambda step: double[step]
    )
    for found in run(body, 2):
        for one, other in zip(found, wanted, strict=True):
            assert float((one - other).abs().max()) <= 2e-6
