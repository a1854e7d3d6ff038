# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peer of the case ``cnn``: plain torch, one process, or DDP over gloo under torchrun.

The same network, pictures, batches and optimizer as the example fashion_mnist, which is
told with the same options.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2] / "examples" / "fashion_mnist")
)

from fashion_mnist import (
    Data,
    Network,
    Results,
    accuracy,
    parse_arguments,
    read_data,
)


def train(options: argparse.Namespace, data: Data, test: Data) -> None:
    rank, trainers = int(os.environ.get("RANK", "0")), 1
    torch.manual_seed(options.seed)
    model: nn.Module = Network()
    trained = model
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        trainers = dist.get_world_size()
        trained = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    about = {"trainers": trainers, "replicas": 1, "strategy": "none"}
    results = Results(options, about)
    for epoch in range(options.epochs):
        results.begin()
        for images, kinds in data.parts(options, epoch, rank, trainers):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                logits = trained(images)
            nn.functional.cross_entropy(logits.float(), kinds).backward()
            optimizer.step()
        if trainers > 1:
            dist.barrier()
        results.end()
        if rank == 0:
            results.show(accuracy(model, test))
        if trainers > 1:
            dist.barrier()
    if trainers > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    told = parse_arguments()
    # torchrun gives every rank one thread; a row's count is in OMP_NUM_THREADS.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    train(told, *read_data(told))
