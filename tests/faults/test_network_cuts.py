# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A network that is cut for less than the liveness, and comes back, loses nobody.

TCP sends again 3.2 and then 6.4 s after the attempt before: without another connection
a link would be silent long after the network is back. Here it is so for ever: only what
is connected anew gets through.
"""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import pytest
import torch
from network_hosts import enter, make_hosts  # noqa: F401
from patience import PATIENCE_S
from sync_cases import KEY

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.processes

# Trainers try another connection from a third of the liveness on. By hand with other
# figures.
LIVENESS_MS = int(os.environ.get("CPUDIST_TEST_LIVENESS_MS", "12000"))
CUT_S = float(os.environ.get("CPUDIST_TEST_CUT_S", "6"))
ALONE = 2  # of a server and two trainers, on the second host


def train(strategy, folder, context, report):
    """Adds one to an element of its own with each step, until it is told a last one."""
    rank = context.trainer_rank
    both = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(both.weight)
    optimizer = cpudist.DistributedOptimizer(
        torch.optim.SGD(both.parameters(), lr=1.0), both, strategy=strategy
    )
    down = torch.zeros(1, 2)
    # A round of Sync has the mean of both.
    down[0, rank] = -2.0 if strategy == "sync" else -1.0
    steps, last = 0, Path(folder) / f"last-{rank}"
    while not last.exists() or steps < int(last.read_text()):
        optimizer.zero_grad()
        (both.weight * down).sum().backward()
        optimizer.step()
        optimizer.flush("none")
        steps += 1
        (Path(folder) / f"steps-{rank}").write_text(f"{steps:09}")
        time.sleep(0.01)
    report(steps)
    cpudist.barrier()
    optimizer.flush()
    values = [int(value) for value in both.weight.detach().flatten()]
    return {"values": values, "reconnects": optimizer.stats()["reconnects"]}


@pytest.mark.parametrize(("strategy", "key"), [("async", KEY), ("sync", {})])
def test_a_cut_shorter_than_the_liveness_loses_nobody(
    strategy, key, make_hosts, tmp_path
):
    hosts = make_hosts()

    def steps_of(trainer, least):
        path = tmp_path / f"steps-{trainer}"
        until = time.monotonic() + PATIENCE_S
        while not (path.exists() and int(path.read_text() or 0) >= least):
            assert time.monotonic() < until, f"trainer {trainer}: {least} steps"
            time.sleep(0.01)
        return int(path.read_text() or 0)

    body = functools.partial(train, strategy, str(tmp_path))
    variables = {"CPUDIST_LIVENESS_MS": str(LIVENESS_MS), **key}
    prepare = functools.partial(enter, hosts.names, ALONE)
    with ProcessRanks(
        body, 3, servers=1, variables=variables, prepare=prepare
    ) as ranks:
        for trainer in (0, 1):
            steps_of(trainer, 5)
        hosts.cut()
        time.sleep(CUT_S)
        before = steps_of(1, 0)
        hosts.mend_for_new()  # whatever TCP sends again, it is not that which helps
        steps_of(1, before + 10)
        last = steps_of(0, 0) + 100, steps_of(1, 0) + 100
        for trainer in (0, 1):
            written = tmp_path / "written"
            written.write_text(str(max(last)))
            written.rename(tmp_path / f"last-{trainer}")
        steps = [
            ranks.expect(rank, "report", PATIENCE_S)["value"] for rank in (1, ALONE)
        ]
        found = ranks.results(PATIENCE_S)[1:]
    # Of its own element each step of a trainer once.
    assert [one["values"] for one in found] == [steps] * 2
    # That of the other one was gone on with over another connection, made in time.
    assert found[0]["reconnects"] == 0
    assert found[1]["reconnects"] >= 1
