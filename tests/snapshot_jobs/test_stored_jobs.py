# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots that jobs of earlier versions saved: runs go on from them for ever.

Those that are stored are never changed; a version of the trainers' state that differs
adds its own folder. With pytest's `pythonpath` in `PYTHONPATH`,
`python tests/snapshot_jobs/test_stored_jobs.py FOLDER` writes those of today.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_cases import settle
from snapshot_parity import net, rows_of, seeing
from sync_cases import ROWS, Batches, loss_of, run

import torch_cpudist as cpudist
from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.resuming.trainer_tree import TREE_VERSION, read_tree
from torch_cpudist.snapshot import trees
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.trainer_files import write_trainer

ROOT = Path(__file__).resolve().parents[1]
SAVED, STEPS = 6, 10


@dataclass(frozen=True)
class Kept:
    """A job whose snapshot is stored."""

    strategy: str
    trainers: int
    remote: bool = False
    members: int = 1  # of the chain
    options: dict[str, Any] = field(default_factory=lambda: {"every_steps": SAVED})


CASES = {
    "sync-static": Kept("Sync", 2),
    "sync-remote": Kept("Sync", 2, remote=True),
    "async-static": Kept("Async", 1),
    "async-remote": Kept("Async", 1, remote=True),
    "allreduce": Kept("AllReduce", 1),
    "chain-remote": Kept(
        "Sync",
        2,
        remote=True,
        members=3,
        options={"every_steps": 100, "delta_every_steps": 2, "full_every": 3},
    ),
}


def trained(case: Kept, folder: Path | None, steps: int) -> list[Any]:
    """What each trainer has at the end, what it draws then, and where it began."""
    batches = Batches(case.trainers, steps=STEPS)

    def body(context: cpudist.Context) -> Any:
        model = net(case.remote)
        inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
        strategy = getattr(cpudist, case.strategy)()
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 3, 0.9)
        noise = torch.Generator().manual_seed(3 + context.trainer_rank)
        started = None
        if folder is not None:
            state = {"schedule": schedule, "noise": noise}
            started = opt.resume(folder, state=state, **case.options)
        for step in range(started.step if started else 0, steps):
            opt.zero_grad()
            part = batches.part(step, context.trainer_rank)
            (loss_of(model, part) * torch.rand((), generator=noise)).backward()
            opt.step()
            schedule.step()
            settle(opt)
        opt.flush()
        cpudist.barrier()
        found = {"rows": rows_of(model), "noise": torch.rand(3, generator=noise)}
        for name, parameter in model.named_parameters():
            if not name.startswith("bag"):
                found[name] = parameter.detach().clone()
        return found, started, schedule.last_epoch

    servers = 0 if case.strategy == "AllReduce" else 1
    return run(body, case.trainers, servers=servers, variables=seeing(folder))


@pytest.mark.parametrize("version", range(1, TREE_VERSION + 1))
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_from_what_was_stored(name, version, tmp_path) -> None:
    case = CASES[name]
    stored = ROOT / "snapshots" / f"jobs-{version}" / name
    folder = tmp_path / "snapshots"
    shutil.copytree(stored, folder)
    newest = Directory(folder).newest()
    assert newest is not None
    snapshot = Snapshot(folder / newest)
    assert snapshot.verify() == []
    assert len(snapshot.members) == case.members
    if case.strategy == "Async":  # how old gradients are differs from run to run
        ((found, _, _),) = trained(case, folder, SAVED)
        rows = snapshot.rows("bag.weight", range(ROWS))
        assert rows.found.any()
        expected = torch.from_numpy(rows.columns["weight"] * rows.found[:, None])
        assert torch.equal(found.pop("rows"), expected)
        del found["noise"]
        assert found
        for part, value in found.items():
            assert torch.equal(value, torch.from_numpy(snapshot.dense(part).copy()))
    again = trained(case, folder, STEPS)
    whole = trained(case, None, STEPS)
    for (found, started, last), (expected, _, _) in zip(again, whole, strict=True):
        assert (started.name, started.step) == (newest, SAVED)
        assert last == STEPS
        assert found.keys() == expected.keys()
        assert torch.equal(found["noise"], expected["noise"])
        for part, value in expected.items() if case.strategy != "Async" else ():
            # Another machine may round otherwise than the one that saved.
            torch.testing.assert_close(found[part], value, msg=part)


def trees_of(folder: Path, change: Any) -> tuple[Path, Any]:
    """A stored trainer's file, with another tree."""
    stored = ROOT / "snapshots" / "jobs-1" / "sync-static"
    newest = Directory(stored).newest()
    assert newest is not None
    tree = Snapshot(stored / newest).trainer(0)
    packed = trees.pack(change(tree), "state of trainer 0")
    return folder, write_trainer(folder, 0, packed, SAVED, number=SAVED)


def test_state_without_a_version_is_of_the_first(tmp_path) -> None:
    def change(tree: Any) -> Any:
        assert tree.pop("version") == 1
        return tree

    folder, trainer = trees_of(tmp_path, change)
    assert read_tree(folder, trainer, Files())["counters"]["steps"] == SAVED


def test_state_of_a_later_version_says_so(tmp_path) -> None:
    folder, trainer = trees_of(tmp_path, lambda tree: tree | {"version": 99})
    with pytest.raises(SnapshotError, match="state of version 99, this release reads"):
        read_tree(folder, trainer, Files())


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: [],
        lambda tree: tree | {"version": 0},
        lambda tree: tree | {"version": "1"},
        lambda tree: tree | {"own": None},
        lambda tree: {"version": 1},
    ],
)
def test_what_is_no_state_of_a_trainer_is_damaged(change, tmp_path) -> None:
    folder, trainer = trees_of(tmp_path, change)
    with pytest.raises(SnapshotCorruptError, match="no state of a trainer") as caught:
        read_tree(folder, trainer, Files())
    assert caught.value.file == "trainer-000.json"


def write_all(above: Path) -> None:
    for name, case in CASES.items():
        shutil.rmtree(above / name, ignore_errors=True)
        (above / name).mkdir(parents=True)
        trained(case, above / name, SAVED + 1)
        for left in (above / name).glob("left_*"):
            shutil.rmtree(left)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
