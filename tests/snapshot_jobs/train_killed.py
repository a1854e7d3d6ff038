# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What torchrun runs in test_kills.py: a job that is killed now and then.

Usage: torchrun --max-restarts=KILLS … train_killed.py FOLDER STRATEGY STEPS KILLS SEED.
Trainer 0 kills a process of the job, itself perhaps, some steps after each start, until
that was done KILLS times. Every trainer writes the model that it ends with.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from sync_cases import RULES, Batches, Model, build, copy_of, loss_of

import torch_cpudist as cpudist
from torch_cpudist.snapshot.names import MANIFEST

EVERY = 5
LONGEST_S = 60.0
STEP_S = 10.0


def is_whole_soon() -> bool:
    """Whether there is a snapshot, or one is whole in time; some need another step."""
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


def train(folder: Path, strategy: str, steps: int, kills: int, seed: int) -> None:
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    drawn = random.Random(1000 * seed + restarts)
    rank = cpudist.trainer_rank()
    batches = Batches(cpudist.trainer_count(), steps=steps)
    model = Model(table=strategy != "local_sgd")
    optimizer = cpudist.DistributedOptimizer(
        build(RULES["adagrad"], model), model, strategy=strategy
    )
    started = optimizer.resume(every_steps=EVERY)
    # The last kill leaves a snapshot: that it is resumed is what is tested.
    leaves = restarts == kills - 1
    last = started.step + drawn.randint(EVERY if leaves else 1, 3 * EVERY)
    kill_at = min(last, steps - 1) if restarts < kills else steps
    for step in range(started.step, steps):
        optimizer.zero_grad()
        loss_of(model, batches.part(step, rank)).backward()
        optimizer.step()
        if step >= kill_at and rank == 0 and (not leaves or is_whole_soon()):
            end_somebody(folder, restarts, drawn)
    optimizer.flush()
    optimizer.close()
    torch.save(copy_of(model), folder / f"trainer-{rank}.pt")
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
