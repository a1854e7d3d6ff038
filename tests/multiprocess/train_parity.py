# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What torchrun runs in test_torchrun.py: trains every rule, one after the other.

Usage: torchrun … train_parity.py FOLDER. Every trainer saves its parameters there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sync_cases import RULES, Batches, Model, build, copy_of, loss_of

import torch_cpudist as cpudist


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


def main() -> None:
    cpudist.init()
    if cpudist.is_server():
        cpudist.serve()
    else:
        states = {name: train(name) for name in RULES}
        file = f"trainer-{cpudist.trainer_rank()}-of-{cpudist.trainer_count()}.pt"
        torch.save(states, Path(sys.argv[1]) / file)
    cpudist.shutdown()


if __name__ == "__main__":
    main()
