# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Many servers and many trainers, all threads of this process."""

from __future__ import annotations

import pytest
from sync_cases import (
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    largest_difference,
    loss_of,
    reference_on,
    run,
)

import torch_cpudist as cpudist

SERVERS, TRAINERS, ROUNDS = 20, 50, 3


@pytest.mark.parametrize(
    ("name", "clip"), [("adagrad", None), ("sgd", cpudist.ClipNorm(0.2))]
)
def test_twenty_servers_and_fifty_trainers(name, clip):
    """More servers than blocks, too; clipping adds a phase to every round."""
    batches = Batches(TRAINERS, steps=ROUNDS)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES[name], model), model, clip=clip
        )
        for step in range(ROUNDS):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            optimizer.step()
        assert optimizer.rounds == ROUNDS
        optimizer.flush()
        return copy_of(model)

    states = run(body, TRAINERS, SERVERS)
    assert len(states) == TRAINERS
    for state in states[1:]:
        assert_same_bits(states[0], state)
    expected, allowed = reference_on(RULES[name], batches, clip=clip)
    if clip is not None:
        unclipped, _ = reference_on(RULES[name], batches)
        assert largest_difference(unclipped, expected) > 100 * allowed
    assert largest_difference(states[0], expected) <= allowed
