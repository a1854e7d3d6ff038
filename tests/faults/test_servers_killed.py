# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A server of a job of its own is killed: torchrun starts all of them again."""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest
from endings import lose
from group_fixtures import groups  # noqa: F401
from patience import PATIENCE_S
from return_groups import train
from sync_cases import KEY

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("return_servers.py")


TRAINED = [("async", "static"), ("async", "remote"), ("geo", "remote")]


@pytest.mark.parametrize(("strategy", "kind"), TRAINED)
@pytest.mark.parametrize(("victim", "key"), [(0, KEY), (1, {})])
def test_trainers_go_on_with_two_servers_that_come_back(
    victim, key, strategy, kind, groups, launch_forks, tmp_path
):
    """Values at the end are all gradients but those that trainers report lost."""
    shared = {
        "CPUDIST_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        "CPUDIST_REJOIN_S": str(int(PATIENCE_S)),
        "CPUDIST_STRATEGY": strategy,
        **key,
    }
    servers = launch_forks(
        f"torchrun --standalone --nproc-per-node=2 --max-restarts=2 {SCRIPT}",
        **groups.variables("server", CPUDIST_TRAINERS="2", **shared),
    )
    body = functools.partial(train, tmp_path, strategy, kind)
    trainers = [groups.start("trainer", body, **shared) for _ in range(2)]
    for job in trainers:
        job.expect(0, "report", PATIENCE_S)
    pid = int((tmp_path / f"server-{victim}.pid").read_text())
    lose(pid, signal.SIGKILL)
    found = [job.expect(0, "result", PATIENCE_S)["value"] for job in trainers]
    assert servers.wait(PATIENCE_S) == 0, servers.text()
    assert int((tmp_path / f"server-{victim}.pid").read_text()) != pid
    assert sorted(rank for rank, *_ in found) == [0, 1]
    for rank, steps, recovered, values in found:
        assert recovered["count"] == 1
        assert 20 < recovered["lost_updates"] < steps
        for some in values:
            assert some[rank] == steps - recovered["lost_updates"]
    assert found[0][3] == found[1][3]
