# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid: tables and dense parameters are saved at one step of all trainers."""

from __future__ import annotations

import json

import pytest
import torch
from hybrid_snapshots import STEPS, hybrid_job, ranks_of
from snapshot_parity import seeing
from sync_cases import ONE_THREAD, assert_same_bits, run
from whole_gradients import expected, saved_values

from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.testing import ProcessRanks

START_S = 90.0


def alone(folder, case):
    """One trainer with two servers, in this process."""

    def body(_):
        return hybrid_job(0, case)

    return run(body, 1, servers=2, variables=seeing(folder))[0]


@pytest.mark.parametrize(
    ("dense", "remote"),
    [
        ("allreduce", False),
        ("allreduce", True),
        ("reduce", False),
        ("reduce", True),
        ("local_sgd", False),
        ("sync", False),
        ("sync", True),
    ],
)
@pytest.mark.parametrize("sparse", ["sync", "async"])
def test_one_trainer_goes_on_bit_for_bit(sparse, dense, remote, tmp_path):
    case = {"sparse": sparse, "dense": dense, "remote": remote, "rule": "adagrad"}
    whole = alone(None, {**case, "steps": STEPS})
    resume = {"every_steps": 2}
    first = alone(tmp_path, {**case, "steps": 9, "resume": resume})
    assert first["stats"]["failed"] == 0
    [newest, *_] = Directory(tmp_path).committed()
    assert Snapshot(tmp_path / newest.name).verify() == []
    again = alone(tmp_path, {**case, "steps": STEPS, "resume": resume})
    assert again["step"] == newest.manifest.trainers[0].steps > 0
    [line] = again["report"]
    assert line.startswith("table 'table.weight': 1")
    if sparse == "sync":
        assert_same_bits(again["values"], whole["values"])


def ranks(trainers, folder, **case):
    variables = {
        **ONE_THREAD,
        "CASE": json.dumps(case),
        "CPUDIST_SNAPSHOT_DIR": str(folder),
    }
    with ProcessRanks(ranks_of, trainers, variables=variables) as started:
        return started.results(START_S)


@pytest.mark.processes
@pytest.mark.parametrize("dense", ["allreduce", "reduce", "sync"])
def test_tables_have_every_gradient_once(dense, tmp_path):
    """Rows of Async have all of each trainer up to one step, dense values are of it."""
    case = {"sparse": "async", "dense": dense, "rule": "sgd"}
    for one in ranks(2, tmp_path, **case, steps=20, resume={"every_steps": 3}):
        assert one["stats"]["failed"] == 0
    names = Directory(tmp_path).names()
    assert names
    for name in names:
        snapshot = Snapshot(tmp_path / name)
        assert snapshot.verify() == []
        counts = [one.steps for one in snapshot.manifest.trainers]
        assert counts[0] == counts[1]
        weight, values = saved_values(snapshot)
        assert torch.equal(weight, expected(counts)[0])
        assert torch.equal(values, expected(counts, (0.5, 0.5))[1])
    for one in ranks(2, tmp_path, **case, steps=30, resume={}):
        assert one["step"] > 0
        assert torch.equal(torch.tensor(one["rows"]), expected([30, 30])[0])
        of_dense = expected([30, 30], (0.5, 0.5))[1]
        assert torch.equal(torch.tensor(one["dense"]), of_dense)


@pytest.mark.processes
def test_trainers_save_while_one_still_waits_for_its_last_answer(tmp_path):
    """Else the others wait for its part, and it waits for them to mark the next."""
    case = {"sparse": "async", "dense": "allreduce", "rule": "sgd", "steps": 3}
    for slow in range(2):
        folder = tmp_path / str(slow)
        late = {"slow": slow, "name": "mine", "resume": {"every_steps": 3}}
        for one in ranks(2, folder, **case, **late):
            assert (one["stats"]["saved"], one["stats"]["failed"]) == (2, 0)
        assert Snapshot(folder / "mine").verify() == []
