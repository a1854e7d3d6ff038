# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots of servers and trainers in jobs of their own."""

from __future__ import annotations

import json

import torch
from own_jobs import own_jobs
from snapshot_cases import settle
from snapshot_parity import seeing
from whole_gradients import model_of, push

import torch_cpudist as cpudist
from torch_cpudist.snapshot import names


def wrapped(strategy="async"):
    model = model_of(remote=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def test_files_have_the_id_of_the_run(tmp_path):
    """By which they are told from what a run that was killed has left."""

    def body(context):
        model, opt = wrapped("sync")
        opt.resume()
        push(opt, model, context.trainer_rank, 0)
        name = opt.save_snapshot()
        settle(opt)
        return context.run_id, name

    with own_jobs(2, **seeing(tmp_path)) as jobs:
        trainers = [jobs.trainer(name, body) for name in "ab"]
        found = [trainer.result() for trainer in trainers]
        run_id, name = found[0]
    assert run_id > 0
    assert found[1] == (run_id, name)
    text = names.run_text(run_id)
    assert name.endswith(f"-{text[-8:]}")
    for rank in range(2):
        entry = json.loads((tmp_path / name / names.trainer_name(rank)).read_text())
        assert entry["run"] == text
