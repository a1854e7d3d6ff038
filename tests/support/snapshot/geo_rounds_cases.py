# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of Geo with an outer optimizer, and what their snapshots have of movement."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from patience import PATIENCE_S
from snapshot_cases import settle
from snapshot_parity import net, seeing
from sync_cases import ROWS, RULES, Batches, build, loss_of, run
from whole_gradients import expected, model_of, push, saved_values

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.trainer_files import read_trainer

OUTER = cpudist.Outer(lr=0.7, momentum=0.9, nesterov=True)
SMALL = cpudist.Sharding(min_block_size=8)


def geo(**options: Any) -> cpudist.Geo:
    """Exchanges in rounds; what is given takes the place of the usual."""
    chosen = {"push_every": 3, "outer": OUTER, "sharding": SMALL, **options}
    return cpudist.Geo(**chosen)


class InTurn:
    """Trainers make their n-th steps together, and take answers in at the next one."""

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.barrier = threading.Barrier(trainers)

    def meet(self) -> None:
        """All are here."""
        self.barrier.wait(PATIENCE_S)

    def step_is_over(self, opt: cpudist.DistributedOptimizer) -> None:
        """The push of the step, if it has made one, is answered, and so is a mark."""
        self.meet()
        trained: Any = opt.trained
        trained.opened.drain()
        settle(opt)
        self.meet()


@torch.no_grad()
def seen(opt: cpudist.DistributedOptimizer, model: Any) -> dict[str, torch.Tensor]:
    """All that training goes on from: values and state of rows that are here."""
    found = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if name != "bag.weight"
    }
    found["rows"] = model.bag(torch.arange(ROWS).unsqueeze(1)).clone()
    trained: Any = opt.trained
    for table in trained.tables:
        kept = table.trained_rows()
        order = kept["rows"].argsort()
        found |= {f"{k} of rows": kept[k][order] for k in ("rows", "counts", "state")}
    state = opt.state_dict()
    for one in state.get("optimizers", [state]):
        for number, parts in one["state"].items():
            for name, value in parts.items():
                found[f"state {number} {name}"] = torch.as_tensor(value).clone()
    return found


def job(
    folder: Path | None,
    steps: int,
    trainers: int = 1,
    servers: int = 1,
    every: int | None = None,
    remote: bool = False,
    saves: int | None = None,
    back: int | None = None,
    **options: Any,
) -> Any:
    """Trains up to a step, from where the newest snapshot is.

    Args:
        saves: after which step ``"named"`` is saved.
        back: after which step it is gone back to, once.
    """
    turns, batches = InTurn(trainers), Batches(trainers, steps=steps)
    models = [net(remote) for _ in range(trainers)]

    def body(context: cpudist.Context) -> Any:
        rank = context.trainer_rank
        model = models[rank]
        inners = build(RULES["adagrad"], model)
        opt = cpudist.DistributedOptimizer(inners, model, strategy=geo(**options))
        started = None
        if folder is not None:
            started = opt.resume(folder, every_steps=every)
        begun, counted, gone_back = seen(opt, model), cpudist.global_step(), False
        step = started.step if started else 0
        while step < steps:
            opt.zero_grad()
            loss_of(model, batches.part(step, rank)).backward()
            opt.step()
            step += 1
            turns.step_is_over(opt)
            if step == saves and not gone_back:
                assert opt.save_snapshot("named") == "named"
            if step == back and not gone_back:
                gone_back, step = True, opt.load_snapshot("named").step
                assert step == saves
        # As the last step has left it: the end hands the rest on.
        ended = seen(opt, model)
        turns.meet()
        return started, begun, ended, counted, opt.stats().get("snapshot")

    return run(body, trainers, servers=servers, variables=seeing(folder))


def trees(folder: Path, name: str) -> list[Any]:
    """What every trainer has in its file, of its strategy."""
    directory = Directory(folder)
    return [
        read_trainer(directory.folder(name), one)["driver"]
        for one in directory.manifest(name).trainers
    ]


def killed_before_its_end(folder: Path) -> str:
    """Removes snapshots of moments at which all is on servers, as the end's are."""
    for found in Directory(folder).committed():
        if _is_between(folder, found.name):
            return found.name
        Directory(folder).remove(found.name)
    raise AssertionError(folder)


def _is_between(folder: Path, name: str) -> bool:
    """Whether all trainers had moved then since their last exchange."""
    return all(tree["since"]["steps"] for tree in trees(folder, name))


def played(
    folder: Path, steps: list[int], every: int, lr: float = 1.0, **options: Any
) -> Any:
    """Two trainers at their own pace; the outer step is the mean of what they moved.

    They make so many steps at least, and more until there is a new snapshot that all
    had moved before.
    """
    models = [model_of(remote=False) for _ in range(2)]
    before, enough = set(Directory(folder).names()), threading.Event()
    until_s = time.monotonic() + PATIENCE_S

    def look() -> None:
        new = set(Directory(folder).names()) - before
        if any(_is_between(folder, name) for name in new):
            enough.set()

    def body(context: cpudist.Context) -> Any:
        rank = context.trainer_rank
        model = models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=lr)
        strategy = geo(outer=cpudist.Outer(lr=1.0), **options)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)
        started = opt.resume(folder, every_steps=every, keep=1000)
        begun = model.dense.detach().clone()
        step = started.step
        while step < steps[rank] or not enough.is_set():
            assert time.monotonic() < until_s
            push(opt, model, rank, step)
            step += 1
            if rank == 0 and step % every == 0:
                look()
        settle(opt)
        return started, begun, opt.stats()["snapshot"]

    return run(body, 2, servers=2, variables=seeing(folder))


def check_movement(folder: Path, lr: float = 1.0, within: float = 0.0) -> int:
    """Means of what was handed on and what has moved since are all steps, once.

    Args:
        folder: of snapshots of two trainers.
        lr: that they stepped by.
        within: how far values may be from that, where they are no whole numbers.

    Returns:
        How many snapshots there are.
    """
    names = Directory(folder).names()
    for name in names:
        snapshot = Snapshot(folder / name)
        assert snapshot.verify() == []
        weight, dense = saved_values(snapshot)
        weight, dense = 2 * weight, 2 * dense
        for tree in trees(folder, name):
            rows = tree["moved"]["tables"]["table.weight"]
            weight[rows["rows"]] += rows["values"] - rows["agreed"]
            for one in tree["moved"]["dense"].values():
                dense += one["values"] - one["agreed"]
        steps = [one.steps for one in snapshot.manifest.trainers]
        table, rest = expected(steps)
        assert (weight - lr * table).abs().max() <= within, (name, steps)
        assert (dense - lr * rest).abs().max() <= within, (name, steps)
    return len(names)
