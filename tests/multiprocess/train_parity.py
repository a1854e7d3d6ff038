# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What torchrun runs in test_torchrun.py: every rule in every layout in turn.

Usage: torchrun … train_parity.py FOLDER. Every trainer saves its parameters there. A
layout of fewer ranks than were launched is told to its ranks as torchrun would.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from sync_cases import RULES, Batches, Model, build, copy_of, loss_of

import torch_cpudist as cpudist

# Those of many ranks first: who is not in a later one has nothing left to do.
LAYOUTS = [(3, 2), (2, 2), (3, 0), (1, 2), (2, 0), (1, 0)]


def file_of(rank: int, trainers: int, servers: int) -> str:
    return f"trainer-{rank}-of-{trainers}-with-{servers}.pt"


def train(name: str) -> dict[str, torch.Tensor]:
    batches = Batches(cpudist.trainer_count())
    model = Model()
    strategy = cpudist.Sync(sharding=cpudist.Sharding(min_block_size=8))
    optimizer = cpudist.DistributedOptimizer(
        build(RULES[name], model), model, strategy=strategy
    )
    for step in range(len(batches)):
        optimizer.zero_grad()
        loss_of(model, batches.part(step, cpudist.trainer_rank())).backward()
        optimizer.step()
    optimizer.flush()
    optimizer.close()
    return copy_of(model)


def take_part(trainers: int, servers: int, folder: Path) -> None:
    ranks = str(trainers + servers)
    os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ["CPUDIST_SERVERS"] = str(servers)
    cpudist.init()
    assert cpudist.trainer_count() == trainers
    if cpudist.is_server():
        cpudist.serve()
    else:
        states = {name: train(name) for name in RULES}
        torch.save(states, folder / file_of(cpudist.trainer_rank(), trainers, servers))
    cpudist.shutdown()


def main() -> None:
    for trainers, servers in LAYOUTS:
        if int(os.environ["RANK"]) < trainers + servers:
            take_part(trainers, servers, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
