# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The averaged gradient of every parameter and table, clipped by its own norm."""

from __future__ import annotations

import pytest
import torch
from sync_cases import (
    RULES,
    SMALL_BLOCKS,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    largest_difference,
    loss_of,
    run,
    train,
    train_plain,
)

import torch_cpudist as cpudist
from torch_cpudist.launch import endpoints

EACH = cpudist.ClipTensorNorm(0.1)
TOGETHER = cpudist.ClipNorm(0.1)
HALF_ASYNC = cpudist.HalfAsync(sharding=SMALL_BLOCKS.sharding)
# Blocks as small travel one by one; without tables all is in float64.
ALLOWED = {True: 1e-6, False: 1e-13}


def uneven(trainers, **options):
    """Batches of 0 to 4 samples; every step has some."""
    return Batches(
        trainers,
        sizes=lambda step, rank: (step + 2 * rank) % 5 or int(rank == 0),
        steps=12,
        **options,
    )


@pytest.mark.parametrize("strategy", [SMALL_BLOCKS, HALF_ASYNC], ids=["sync", "half"])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (1, 3), (2, 3), (3, 2)])
@pytest.mark.parametrize("table", [True, False])
def test_each_equals_torch_on_the_averaged_gradient(strategy, trainers, servers, table):
    """As clip_grad_norm_ for each parameter, wherever its blocks and rows are."""
    batches = uneven(trainers, dtype=torch.float64)
    options = {"dtype": torch.float64, "table": table}
    expected = train_plain(RULES["sgd"], batches, clip=EACH, **options)
    for other in (None, TOGETHER):
        without = train_plain(RULES["sgd"], batches, clip=other, **options)
        assert largest_difference(expected, without) > 1000 * ALLOWED[table]
    states = train(
        RULES["sgd"],
        batches,
        servers,
        by_samples=True,
        clip=EACH,
        strategy=strategy,
        **options,
    )
    for state in states[1:]:
        assert_same_bits(state, states[0])
    assert largest_difference(states[0], expected) <= ALLOWED[table]


@pytest.mark.parametrize("rule", ["adam", "sparse_adam", "row_wise_adagrad"])
def test_rules_with_state_get_the_clipped_gradient(rule):
    batches = uneven(2)
    expected = train_plain(RULES[rule], batches, clip=EACH)
    states = train(
        RULES[rule], batches, 2, by_samples=True, clip=EACH, strategy=SMALL_BLOCKS
    )
    plain = train_plain(RULES[rule], batches)
    allowed = 2e-5
    assert largest_difference(plain, expected) > 100 * allowed
    assert largest_difference(states[0], expected) <= allowed


def test_both_parts_of_a_hybrid_on_servers_clip_their_own():
    batches = uneven(2)
    expected = train_plain(RULES["sgd"], batches, clip=EACH)
    hybrid = cpudist.Hybrid(dense="sync", sparse="sync")
    states = train(
        RULES["sgd"], batches, 2, by_samples=True, clip=EACH, strategy=hybrid
    )
    assert largest_difference(states[0], expected) <= 1e-6


def test_a_coded_wire_rounds_before_it_clips():
    """What came of both trainers in bfloat16 is averaged, and that is clipped."""

    def body(context):
        table = torch.nn.Embedding(4, 2, sparse=True)
        dense = torch.nn.Parameter(torch.zeros(3))
        model = torch.nn.ParameterList([dense])
        model.table = table
        torch.nn.init.zeros_(table.weight)
        opt = cpudist.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model,
            strategy=cpudist.Sync(
                communicator=cpudist.Communicator(wire_dtype="bf16", pull_dtype="fp32")
            ),
            clip=cpudist.ClipTensorNorm(1.0),
        )
        opt.zero_grad()
        scale = float(context.trainer_rank)
        loss = (dense * torch.tensor([6.0, 8.0, 0.0])).sum() * scale
        (loss + (table(torch.tensor([0, 1, 0])) * 0.25).sum() * scale).backward()
        opt.step()
        opt.flush()
        return dense.detach().clone(), table.weight.detach().clone()

    for dense, rows in run(body, 3, 2):
        # The means: (6, 8, 0) of norm 10; rows (0.5, 0.5), (0.25, 0.25), norm below 1.
        torch.testing.assert_close(dense, torch.tensor([-0.6, -0.8, 0.0]))
        assert rows.tolist() == [[-0.5, -0.5], [-0.25, -0.25], [0, 0], [0, 0]]


def steps_with(clip, rank_clips=None):
    """Three steps of two trainers; what trainer 0 counted."""
    batches = Batches(2, steps=3)

    def body(context):
        model = Model()
        mine = clip if rank_clips is None else rank_clips[context.trainer_rank]
        opt = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model, clip=mine)
        for step in range(3):
            opt.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            opt.step()
        return opt.stats()

    # Without heartbeats.
    return run(body, 2, 2, variables={"CPUDIST_LIVENESS_MS": "600000"})[0]


def test_it_costs_eight_bytes_per_tensor_and_no_message_more(monkeypatch):
    # Whoever waits for long on a busy machine would ask what has arrived.
    monkeypatch.setattr(endpoints, "THREADS_PROBE_MS", 600_000)
    one, each = steps_with(TOGETHER), steps_with(EACH)
    assert one["requests"] == each["requests"]
    tensors = len(list(Model().parameters()))
    more = 3 * 2 * 8 * (tensors - 1)  # steps, servers
    assert each["bytes_sent"] - one["bytes_sent"] == more
    assert each["bytes_received"] - one["bytes_received"] == more


def test_a_round_without_gradient_and_one_of_no_samples_go_through():
    def body(context):
        model = Model()
        opt = cpudist.DistributedOptimizer(build(RULES["sgd"], model), model, clip=EACH)
        before = copy_of(model)
        opt.step()
        opt.step(samples=0)
        assert_same_bits(before, copy_of(model))
        return opt.rounds

    assert run(body, 2, 2) == [2, 2]


def test_trainers_that_clip_otherwise_are_told():
    with pytest.raises(cpudist.ConfigMismatchError, match="tensor by its own norm"):
        steps_with(None, rank_clips=[TOGETHER, EACH])
