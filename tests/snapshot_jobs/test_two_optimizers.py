# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two optimizers, of models that train each other, save and resume side by side."""

from __future__ import annotations

import pytest
import torch
from snapshot_cases import settle
from snapshot_parity import net, rows_of, seeing
from sync_cases import Batches, assert_same_bits, loss_of, run

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory

EVERY = 5
STRATEGIES = {"sync": cpudist.Sync, "async": cpudist.Async}


def trained(kind, remote, trainers, folder, steps):
    """What trainer 0 has at the end of each, where it began, and what was saved."""
    batches = Batches(trainers, steps=steps)

    def body(context):
        models = [net(remote), net(remote)]
        opts = [
            cpudist.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model,
                strategy=STRATEGIES[kind](),
            )
            for model in models
        ]
        started = [opt.resume(folder, every_steps=EVERY) for opt in opts]
        for step in range(started[0].step, steps):
            part = batches.part(step, context.trainer_rank)
            for opt, model in zip(opts, models, strict=True):
                # The second marks while what the first has marked is being written.
                opt.zero_grad()
                loss_of(model, part).backward()
                opt.step()
            for opt in opts:
                settle(opt)
        for opt in opts:
            opt.flush()
        cpudist.barrier()
        return (
            [{"rows": rows_of(model)} for model in models],
            [one.step for one in started],
            [opt.stats()["snapshot"] for opt in opts],
        )

    return run(body, trainers, servers=1, variables=seeing(folder))


@pytest.mark.parametrize("remote", [False, True], ids=["static", "remote"])
@pytest.mark.parametrize(("kind", "trainers"), [("sync", 2), ("async", 1)])
def test_both_are_saved_each_time_and_go_on_at_one_step(
    kind, trainers, remote, tmp_path
) -> None:
    steps = 8 * EVERY
    first = trained(kind, remote, trainers, tmp_path / "a", steps)
    for _, started, counts in first:
        assert started == [0, 0]
        assert [one["skipped"] for one in counts] == [0, 0]
        assert [one["failed"] for one in counts] == [0, 0]
        assert [one["saved"] for one in counts] == [8, 8]
    directory = Directory(tmp_path / "a")
    for number in (0, 1):
        assert directory.newest(number) is not None
    again = trained(kind, remote, trainers, tmp_path / "a", steps + EVERY)
    assert all(started == [steps, steps] for _, started, _ in again)
    if kind == "async":
        return
    whole = trained(kind, remote, trainers, tmp_path / "b", steps + EVERY)
    for (found, _, _), (expected, _, _) in zip(again, whole, strict=True):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
