# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
r"""Trains a small convolutional network on Fashion-MNIST with all cores of a machine.

python examples/fashion_mnist/fashion_mnist.py
CPU_NUM=2 python examples/fashion_mnist/fashion_mnist.py
CPUDIST_BACKEND=gloo torchrun --standalone --nproc-per-node=2 \
    examples/fashion_mnist/fashion_mnist.py

Replicas and trainers share one batch of the same size, so every layout makes the same
steps on the same pictures. CPUDIST_STRATEGY chooses another strategy than AllReduce.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from fashion_mnist_data import DEVIATION, FOLDER, MEAN, DataError, Pictures, load
from torch import nn

import torch_cpudist as cpudist

TEST_BATCH = 1000
Batch = tuple[torch.Tensor, torch.Tensor]


class Network(nn.Module):
    """Two convolutions, each pooled, and two linear layers: 1.2 million parameters."""

    def __init__(self) -> None:
        """Make the layers, by torch's random numbers."""
        super().__init__()
        self.first = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.second = nn.Conv2d(32, 64, kernel_size=3)
        self.hidden = nn.Linear(64 * 6 * 6, 512)
        self.last = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n, 10]`` for images ``[n, 1, 28, 28]``."""
        inner = F.max_pool2d(F.relu(self.first(images)), 2)
        inner = F.max_pool2d(F.relu(self.second(inner)), 2)
        inner = F.relu(self.hidden(inner.flatten(1)))
        return cast(torch.Tensor, self.last(inner))


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss of a batch, or of a replica's part of it."""
    images, kinds = batch
    return F.cross_entropy(model(images), kinds)


class Data:
    """A split as tensors; pictures become floats when they are needed."""

    def __init__(self, pictures: Pictures, limit: int | None = None) -> None:
        """Keep the first `limit` pictures."""
        self.images = torch.from_numpy(pictures.images[:limit])
        self.kinds = torch.from_numpy(pictures.kinds[:limit])

    def batch(self, rows: torch.Tensor) -> Batch:
        """Return the pictures of these rows, scaled to mean 0 and deviation 1."""
        scaled = (self.images[rows].float() / 255 - MEAN) / DEVIATION
        return scaled, self.kinds[rows]

    def parts(
        self, options: argparse.Namespace, epoch: int, rank: int, trainers: int
    ) -> Iterator[Batch]:
        """Yield a trainer's part of every whole batch of an epoch."""
        generator = torch.Generator().manual_seed(options.seed * 1000 + epoch)
        order = torch.randperm(len(self.kinds), generator=generator)
        size = options.batch_size
        for step in range(len(order) // size):
            yield self.batch(order[step * size : (step + 1) * size][rank::trainers])


@torch.no_grad()
def kinds_said(model: nn.Module, data: Data) -> torch.Tensor:
    """Return the kind that the model says of each test picture."""
    model.eval()
    rows = torch.arange(len(data.kinds)).split(TEST_BATCH)
    said = torch.cat([model(data.batch(some)[0]).argmax(1) for some in rows])
    model.train()
    return said


def accuracy(model: nn.Module, data: Data) -> float:
    """Return the share of test pictures whose kind the model says."""
    right = int((kinds_said(model, data) == data.kinds).sum())
    return right / len(data.kinds)


class Results:
    """Time and accuracy of every epoch: on the screen and in a file of JSON lines."""

    def __init__(self, options: argparse.Namespace, about: dict[str, Any]) -> None:
        """Note who trains: trainers, replicas, strategy."""
        self.options, self.about = options, about
        self.epochs: list[dict[str, float]] = []

    def begin(self) -> None:
        """Start the clocks of an epoch."""
        self.began, self.began_cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Stop them."""
        seconds = time.perf_counter() - self.began
        cpu_s = time.process_time() - self.began_cpu
        self.epochs.append({"seconds": seconds, "cpu_s": cpu_s})

    def show(self, area: float) -> None:
        """Print the epoch, and write the file anew."""
        self.epochs[-1]["accuracy"] = area
        print(
            f"epoch {len(self.epochs)}: {self.epochs[-1]['seconds']:.1f} s, "
            f"test accuracy {area:.4f}",
            flush=True,
        )
        if self.options.results is not None:
            line = json.dumps({**self.about, "epochs": self.epochs})
            self.options.results.write_text(line + "\n", encoding="utf-8")


def replicas_wanted() -> int:
    """Return CPU_NUM, which init() has checked; 1 if it is not set."""
    return int(os.environ.get("CPU_NUM") or 1)


def train(options: argparse.Namespace, data: Data, test: Data) -> None:
    """Train and measure; every trainer calls this."""
    rank, trainers = cpudist.trainer_rank(), cpudist.trainer_count()
    replicas = replicas_wanted()
    if options.batch_size % (trainers * replicas):
        sys.exit(
            f"--batch-size {options.batch_size} cannot be shared by {trainers} "
            f"trainer(s) with {replicas} replica(s) each; pass a multiple of both"
        )
    torch.manual_seed(options.seed)
    model = Network()
    adam = torch.optim.Adam(model.parameters(), lr=options.lr)
    if options.bf16:
        cpudist.optimize(model, adam)
    optimizer = cpudist.DistributedOptimizer(adam, model, cpudist.AllReduce())
    executor = (
        cpudist.ReplicaExecutor(model, loss_of, optimizer) if replicas > 1 else None
    )
    about = {"trainers": trainers, "replicas": replicas}
    results = Results(options, {**about, "strategy": optimizer.strategy.name})
    for epoch in range(options.epochs):
        results.begin()
        for batch in data.parts(options, epoch, rank, trainers):
            if executor is not None:
                executor.run(batch)
            else:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        cpudist.barrier()  # everybody's pictures are in the model that is measured
        optimizer.flush()
        results.end()
        if rank == 0:
            results.show(accuracy(model, test))
        cpudist.barrier()  # nobody trains on meanwhile
    if executor is not None:
        executor.close()
    if rank == 0 and options.picture is not None:
        from fashion_mnist_picture import draw  # matplotlib only where asked for

        accuracies = [epoch["accuracy"] for epoch in results.epochs]
        kinds = test.kinds.numpy()
        draw(options.picture, accuracies, kinds, kinds_said(model, test).numpy())
        print(f"picture: {options.picture}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=FOLDER, help="folder of the four files")
    add("--epochs", type=int, default=3, help="passes over the training pictures")
    add("--batch-size", type=int, default=512, help="pictures in a step, of all")
    add("--lr", type=float, default=0.001, help="learning rate of Adam")
    add("--seed", type=int, default=1, help="of initial weights and of the order")
    add("--rows", type=int, help="train on the first ROWS pictures only")
    add("--bf16", action="store_true", help="compute in bfloat16: cpudist.optimize")
    add("--results", type=Path, help="file for what was measured, as a JSON line")
    add("--picture", type=Path, help="PNG to write (needs matplotlib)")
    options = parser.parse_args(arguments)
    for name in ("epochs", "batch_size", "rows"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    return options


def read_data(options: argparse.Namespace) -> tuple[Data, Data]:
    """Return the pictures to train and to test on; end with a sentence without them."""
    try:
        data = Data(load(options.data, "train"), options.rows)
        test = Data(load(options.data, "t10k"))
    except DataError as error:
        sys.exit(f"Fashion-MNIST: {error}")
    if len(data.kinds) < options.batch_size:
        sys.exit(
            f"--batch-size {options.batch_size} is more than the {len(data.kinds)} "
            "pictures to train on"
        )
    return data, test


def main() -> None:
    """Serve or train, as the launch says."""
    options = parse_arguments()
    data, test = read_data(options)
    cpudist.init()
    try:
        if cpudist.is_server():
            cpudist.serve()
        else:
            train(options, data, test)
    finally:
        cpudist.shutdown()


if __name__ == "__main__":
    main()
