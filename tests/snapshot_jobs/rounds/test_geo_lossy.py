# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo with an outer optimizer over a wire that rounds: what it keeps back is saved.

A row stands at what was handed on, rounded, and at the rest of its movement, which is
the trainer's until the row is handed on again.
"""

from __future__ import annotations

import pytest
import torch
from geo_rounds_cases import check_movement, job, killed_before_its_end, played, trees
from snapshot_parity import seeing
from sync_cases import assert_same_bits, run
from whole_gradients import model_of

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory

BF16, INT8 = {"wire_dtype": "bf16"}, {"wire_dtype": "int8"}
# Values come exact: a row that this trainer has not moved is the servers', to the bit.
EXACT_PULLS = {"wire_dtype": "bf16", "pull_dtype": "fp32"}
CASES = [
    {"communicator": BF16},
    {"communicator": INT8, "trainers": 2, "servers": 2},
    {"communicator": EXACT_PULLS, "trainers": 2, "push_every": 1, "remote": True},
]
# With bfloat16's 8 bits whole numbers times this are rounded, and all sums are exact.
LR = 257.0


@pytest.mark.parametrize(
    "case", CASES, ids=lambda one: " ".join(map(str, one.values()))
)
def test_goes_on_bit_for_bit(case, tmp_path):
    undisturbed = job(tmp_path / "whole", 31, every=5, **case)
    job(tmp_path / "two", 18, every=5, **case)
    newest = killed_before_its_end(tmp_path / "two")
    again = job(tmp_path / "two", 31, every=5, **case)
    for (_, _, whole, *_), (started, _, ended, _, stats) in zip(
        undisturbed, again, strict=True
    ):
        assert (started.name, stats["failed"]) == (newest, 0)
        assert_same_bits(ended, whole)


@pytest.mark.parametrize(
    "communicator",
    [BF16, EXACT_PULLS, {"wire_dtype": "fp32", "pull_dtype": "bf16"}],
    ids=lambda one: " ".join(one.values()),
)
def test_all_movement_is_in_them_once(communicator, tmp_path):
    """Also what rounding has kept back of rows that nobody has touched since."""
    options = {"lr": LR, "communicator": communicator}
    for *_, stats in played(tmp_path, [61, 61], 7, **options):
        assert stats["failed"] == 0
    newest = killed_before_its_end(tmp_path)
    assert check_movement(tmp_path, LR) > 0
    rounds = communicator["wire_dtype"] != "fp32"
    kept = [tree["moved"]["tables"]["table.weight"] for tree in trees(tmp_path, newest)]
    assert any((one["touched"] == 0).any() for one in kept) == rounds
    for started, _, stats in played(tmp_path, [130, 130], 9, **options):
        assert (started.name, stats["failed"]) == (newest, 0)
    assert killed_before_its_end(tmp_path) != newest
    assert check_movement(tmp_path, LR) > 0


def test_what_int8_keeps_back_is_in_them(tmp_path):
    """Within what sums of 32 bits lose, a hundredth of a step of its grid."""
    for *_, stats in played(tmp_path, [61, 61], 7, communicator=INT8):
        assert stats["failed"] == 0
    killed_before_its_end(tmp_path)
    assert check_movement(tmp_path, within=1e-3) > 0


def test_a_run_whose_wire_does_not_round_hands_it_on(tmp_path):
    """It counts as moved: nothing keeps it back any more."""
    played(tmp_path, [61, 61], 7, lr=LR, communicator=BF16)
    newest = killed_before_its_end(tmp_path)
    kept = [
        len(tree["moved"]["tables"]["table.weight"]["rows"])
        for tree in trees(tmp_path, newest)
    ]
    steps = [one.steps for one in Directory(tmp_path).manifest(newest).trainers]

    def body(context):
        model = model_of(remote=False)
        inner = torch.optim.SGD(model.parameters(), lr=LR)
        strategy = cpudist.Geo(push_every=3, outer=cpudist.Outer(lr=1.0))
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
        assert opt.resume(tmp_path).step == steps[context.trainer_rank]
        assert opt.trained.exchange.moved_count(0) == kept[context.trainer_rank] > 0

    run(body, 2, servers=1, variables=seeing(tmp_path))
