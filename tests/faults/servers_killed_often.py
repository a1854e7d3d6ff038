# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Servers of a job of their own are killed again and again, at random moments.

Takes minutes, so that pytest collects it by its name only: ``scripts/test.sh --long``,
or by hand

    CPUDIST_TEST_KILLS=5 CPUDIST_TEST_SEED=7 python -m pytest -s \
        tests/faults/servers_killed_often.py
"""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import functools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from endings import lose
from group_fixtures import groups  # noqa: F401
from patience import PATIENCE_S
from torch import nn

import torch_cpudist as cpudist

pytestmark = pytest.mark.processes

KILLS = int(os.environ.get("CPUDIST_TEST_KILLS", "50"))
SEED = int(os.environ.get("CPUDIST_TEST_SEED", "1"))
SCRIPT = Path(__file__).with_name("return_servers.py")
# As many ids as a step of 100 samples of 26 columns has.
ROWS, DIM, IDS = 400_000, 16, 2_600
DENSE = 50_000
# Between two kills: they meet steps, snapshots, servers that load or that have not met.
LONGEST_S = 4.0


class Clicks(nn.Module):
    """A step adds one to a row for each id that names it, and to its trainer's part."""

    def __init__(self) -> None:
        super().__init__()
        with cpudist.remote_tables(min_rows=1):
            self.table = nn.Embedding(ROWS, DIM, sparse=True)
            nn.init.zeros_(self.table.weight)
        self.any_key = cpudist.Embedding(1, initial=cpudist.Constant(0.0))
        self.dense = nn.Parameter(torch.zeros(2, DENSE))

    def forward(self, ids: torch.Tensor, rank: int) -> torch.Tensor:
        rows = self.table(ids).sum() + self.any_key(-ids).sum()
        return -(rows + self.dense[rank].sum())


# How often all rows are saved, or what has changed; Geo has no snapshots of changes.
OFTEN = {
    "async": {"every_steps": 400, "delta_every_steps": 20},
    "geo": {"every_steps": 50},
}


def train(
    folder: Path, strategy: str, context: cpudist.Context, report: Any
) -> dict[str, Any]:
    """Trains until it is told to stop; what was made, and what servers have then."""
    rank = context.trainer_rank
    model = Clicks()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
    opt.resume(**OFTEN[strategy])
    cpudist.barrier()  # none is saved while one of them is not there
    draws = torch.Generator().manual_seed(SEED + rank)
    while not (folder / "stop").exists():
        opt.zero_grad()
        model(torch.randint(ROWS, (IDS,), generator=draws), rank).backward()
        opt.step()
    cpudist.barrier()
    opt.flush("dense")
    sums = torch.zeros(DIM + 1, dtype=torch.float64)
    with torch.no_grad():
        for ids in torch.arange(ROWS).split(50_000):
            sums[:DIM] += model.table(ids).double().sum(0)
            sums[DIM] += model.any_key(-ids).double().sum()
    cpudist.barrier()
    found = {
        "rank": rank,
        "steps": opt.stats()["steps"],
        "sums": sums.tolist(),
        "dense": [part.unique().tolist() for part in model.dense.detach()],
    }
    return found | opt.stats()["recovered"]


def newest_pid(folder: Path, server: int, killed: set[int]) -> int | None:
    """The process of a server that is there now; none between two of its lives."""
    try:
        pid = int((folder / f"server-{server}.pid").read_text())
        ours = Path(f"/proc/{pid}/cwd").readlink() == folder
    except (OSError, ValueError):  # being written, or gone
        return None
    return pid if ours and pid not in killed else None


@pytest.mark.parametrize("strategy", OFTEN)
@pytest.mark.timeout(3 * PATIENCE_S + 60 * KILLS)
def test_what_is_lost_is_counted_however_often(
    strategy, groups, launch_forks, eventually, tmp_path
):
    shared = {
        "CPUDIST_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        "CPUDIST_REJOIN_S": str(int(PATIENCE_S)),
        "CPUDIST_STRATEGY": strategy,
    }
    servers = launch_forks(
        f"torchrun --standalone --nproc-per-node=2 --max-restarts={KILLS} {SCRIPT}",
        **groups.variables("server", CPUDIST_TRAINERS="2", **shared),
    )
    body = functools.partial(train, tmp_path, strategy)
    trainers = [groups.start("trainer", body, **shared) for _ in range(2)]
    eventually(
        lambda: list(tmp_path.glob("snapshots/*/manifest.json")),
        PATIENCE_S,
        "a snapshot",
    )
    draws = random.Random(SEED)
    killed: set[int] = set()
    for _ in range(KILLS):
        time.sleep(draws.uniform(0, LONGEST_S))
        server = draws.randrange(2)
        find = functools.partial(newest_pid, tmp_path, server, killed)
        eventually(lambda find=find: find(), PATIENCE_S, f"server {server} is there")
        pid = find()
        if pid is not None:  # else torchrun has ended it, with the other one
            lose(pid, signal.SIGKILL)
            killed.add(pid)
    (tmp_path / "stop").touch()
    found = [job.expect(0, "result", PATIENCE_S)["value"] for job in trainers]
    assert servers.wait(PATIENCE_S) == 0, servers.text()

    for one in found:
        print({name: one[name] for name in ("rank", "steps", "count", "lost_updates")})
    print(f"{strategy}: {len(killed)} kills, seed {SEED}")
    kept = {one["rank"]: one["steps"] - one["lost_updates"] for one in found}
    assert kept.keys() == {0, 1}
    assert all(one["count"] > 0 for one in found)
    for one in found:
        assert one["dense"] == [[kept[0]], [kept[1]]]
        assert one["sums"] == [IDS * (kept[0] + kept[1])] * (DIM + 1)
