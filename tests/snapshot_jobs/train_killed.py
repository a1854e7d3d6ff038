# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What torchrun runs in test_kills.py: a job that is killed now and then.

Usage: torchrun --max-restarts=KILLS … train_killed.py FOLDER STRATEGY STEPS KILLS SEED.
Trainer 0 kills a process of the job, itself perhaps, some steps after each start, until
that was done KILLS times. Every trainer writes the model that it ends with. Strategies
of WHOLE have gradients that are whole numbers, so that values say which were applied.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import whole_gradients
from sync_cases import RULES, Batches, Model, build, copy_of, loss_of

import torch_cpudist as cpudist
from torch_cpudist.snapshot.names import MANIFEST

EVERY = 5
LONGEST_S = 60.0
# Less than others wait for trainer 0, whose next step a snapshot may need.
STEP_S = 1.0
MEETING_STEPS = 4
SMALL = cpudist.Sharding(min_block_size=2)
# By the name of a case: the strategy, and whether the table is remote.
WHOLE = {
    "async": (lambda: cpudist.Async(sharding=SMALL), False),
    "async_remote": (lambda: cpudist.Async(sharding=SMALL), True),
    "half_async": (
        lambda: cpudist.HalfAsync(group=[[0, 1], [2]], sharding=SMALL),
        False,
    ),
    "sync_remote": (lambda: cpudist.Sync(sharding=SMALL), True),
    "geo_outer": (
        lambda: cpudist.Geo(push_every=1000, outer=cpudist.Outer(lr=1.0)),
        False,
    ),
    "hybrid": (
        lambda: cpudist.Hybrid(dense=cpudist.AllReduce(), sparse=cpudist.Async()),
        False,
    ),
}


def is_whole_soon() -> bool:
    """Whether there is a snapshot, or one is whole in time; else after more steps."""
    folder = Path(os.environ["CPUDIST_SNAPSHOT_DIR"])
    deadline = time.monotonic() + STEP_S
    while not (whole := any(folder.glob(f"*/{MANIFEST}"))):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return whole


def end_somebody(folder: Path, restarts: int, drawn: random.Random) -> None:
    """Kills a process of the job, and waits to be ended with the others."""
    ranks = int(os.environ["WORLD_SIZE"])
    victim = drawn.randrange(ranks)
    file = folder / f"pid-{restarts}-{victim}"
    with (folder / "killed").open("a") as told:
        told.write(f"{victim}\n")
    os.kill(int(file.read_text()), signal.SIGKILL)
    time.sleep(LONGEST_S)


class Real:
    """The model of the tests of strategies, and its steps."""

    def __init__(self, strategy: str, steps: int) -> None:
        self.batches = Batches(cpudist.trainer_count(), steps=steps)
        self.model = Model(table=strategy != "local_sgd")
        self.optimizer = cpudist.DistributedOptimizer(
            build(RULES["adagrad"], self.model), self.model, strategy=strategy
        )
        self.often = {"every_steps": EVERY}

    def step(self, step: int, rank: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, self.batches.part(step, rank)).backward()
        self.optimizer.step()

    def ended(self) -> dict[str, torch.Tensor]:
        self.optimizer.flush()
        self.optimizer.close()
        return copy_of(self.model)


class Whole:
    """One whose gradients are whole numbers; it saves what has changed."""

    def __init__(self, strategy: str) -> None:
        make, remote = WHOLE[strategy]
        self.model = whole_gradients.model_of(remote)
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = cpudist.DistributedOptimizer(
            inner, self.model, strategy=make()
        )
        self.often = {"every_steps": 4 * EVERY, "delta_every_steps": EVERY}
        # All rounds are made by barriers, so that each has both trainers.
        self.meets = strategy == "geo_outer"
        if self.meets:
            self.often = {"every_steps": EVERY}

    def step(self, step: int, rank: int) -> None:
        whole_gradients.push(self.optimizer, self.model, rank, step)
        if self.meets and step % MEETING_STEPS == MEETING_STEPS - 1:
            cpudist.barrier()

    def ended(self) -> dict[str, torch.Tensor]:
        cpudist.barrier()  # all pushes are applied, and rows here are old
        self.optimizer.flush()
        with torch.no_grad():
            rows = self.model.table(torch.arange(whole_gradients.ROWS)).clone()
        dense = self.model.dense.detach().clone()
        self.optimizer.close()
        return {"table": rows, "dense": dense}


def train(folder: Path, strategy: str, steps: int, kills: int, seed: int) -> None:
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    drawn = random.Random(1000 * seed + restarts)
    rank = cpudist.trainer_rank()
    job = Whole(strategy) if strategy in WHOLE else Real(strategy, steps)
    started = job.optimizer.resume(**job.often)
    # The last kill leaves a snapshot: that it is resumed is what is tested.
    leaves = restarts == kills - 1
    last = started.step + drawn.randint(EVERY if leaves else 1, 3 * EVERY)
    kill_at = min(last, steps - 1) if restarts < kills else steps
    for step in range(started.step, steps):
        job.step(step, rank)
        if step >= kill_at and rank == 0 and (not leaves or is_whole_soon()):
            end_somebody(folder, restarts, drawn)
    torch.save(job.ended(), folder / f"trainer-{rank}.pt")
    (folder / f"from-{rank}").write_text(f"{started.step}")


def main() -> None:
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    steps, kills, seed = (int(word) for word in sys.argv[3:])
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    file = folder / f"pid-{restarts}-{os.environ['RANK']}"
    file.with_suffix(".tmp").write_text(str(os.getpid()))
    file.with_suffix(".tmp").rename(file)
    cpudist.init()  # all have written their numbers
    if cpudist.is_server():
        cpudist.serve()
    else:
        train(folder, strategy, steps, kills, seed)
    cpudist.shutdown()


if __name__ == "__main__":
    main()
