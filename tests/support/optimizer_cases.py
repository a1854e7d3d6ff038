# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How tests of the optimizer wrap models, and compare with one process."""

from __future__ import annotations

import torch
from sync_cases import (
    Batches,
    Model,
    assert_same_bits,
    copy_of,
    largest_difference,
    run,
)
from torch import nn

import torch_cpudist as cpudist

STEPS = 12
ALLOWED = 2e-6


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1} | options))


def wrapped(model, optimizer=None, **options):
    return cpudist.DistributedOptimizer(optimizer or sgd(model), model, **options)


def linear():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    return model


def alone(fn):
    return run(lambda context: fn(), 1)[0]


def equals_one_process(plain_run, server_run, trainers=2, allowed=ALLOWED):
    """``server_run(model, batches, rank)`` on every trainer against ``plain_run``."""
    batches = Batches(trainers, steps=STEPS)
    plain = Model()
    plain_run(plain, batches)

    def body(context):
        model = Model()
        server_run(model, batches, context.trainer_rank)
        return copy_of(model)

    states = run(body, trainers, 2)
    assert_same_bits(states[0], states[1])
    assert largest_difference(states[0], copy_of(plain)) <= allowed
    assert largest_difference(states[0], copy_of(Model())) > 100 * allowed


def step_on(model, optimizer, value=1.0):
    optimizer.zero_grad()
    model(torch.full((1, 3), value)).square().sum().backward()
    optimizer.step()
