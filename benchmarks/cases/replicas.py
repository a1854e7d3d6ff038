# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``replicas``: from which step time on replicas of one process are worth it.

The dense part of ``ctr``'s model at several batches per replica, in one process: plain
torch with one thread and with as many as replicas, and replicas of one thread each, in
turn. Small steps are held back by Python's lock, large ones by nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from ctr_data import CtrSpec
from peers.common import make_mlp
from torch import nn

import torch_cpudist as cpudist

BATCHES = (1, 8, 32, 128, 256, 512)
COLUMNS = {
    "name": "name",
    "step_ms": "one thread, ms",
    "rate_threads": "threads",
    "rate_replicas": "replicas",
    "cpu_replicas": "CPU time",
}


def _loss_of(model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    logits = model(part[0]).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(logits, part[1])


def _rate(step: Callable[[], int], seconds: float) -> tuple[float, float]:
    """Samples per second, and per second of CPU time."""
    samples, cpu_s, begin = 0, time.process_time(), time.perf_counter()
    while (passed := time.perf_counter() - begin) < seconds:
        samples += step()
    return samples / passed, samples / (time.process_time() - cpu_s)


def _steps(batch: int, replicas: int, dim: int, lr: float) -> list[Callable[[], int]]:
    """A step of one thread, of several, and of replicas."""
    spec = CtrSpec()
    width = spec.slots * dim + spec.dense
    model = make_mlp(spec, dim)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=lr)
    whole = (torch.randn(batch * replicas, width), torch.ones(batch * replicas))
    part = (whole[0][:batch], whole[1][:batch])
    executor = cpudist.ReplicaExecutor(
        model, _loss_of, optimizer, replicas, num_threads=1
    )

    def plain(threads: int) -> Callable[[], int]:
        def step() -> int:
            torch.set_num_threads(threads)
            optimizer.zero_grad()
            _loss_of(model, part).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return batch

        return step

    def together() -> int:
        torch.set_num_threads(1)
        executor.run(whole)
        return batch * replicas

    return [plain(1), plain(replicas), together]


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Yields a row per batch, of medians over ``--launches`` turns."""
    replicas = len(os.sched_getaffinity(0))
    for batch in BATCHES:
        steps = _steps(batch, replicas, args.dim, args.lr)
        for step in steps * args.warmup_steps:
            step()
        turns = [[_rate(s, args.seconds) for s in steps] for _ in range(args.launches)]
        one, many, ours = (median(turn[i][0] for turn in turns) for i in range(3))
        cpu = [median(turn[i][1] for turn in turns) for i in (0, 2)]
        yield {
            "case": "replicas",
            "name": f"batch {batch}",
            "replicas": replicas,
            "step_ms": 1000 * batch / one,
            "rate_threads": many / one,
            "rate_replicas": ours / one,
            "cpu_replicas": cpu[0] / cpu[1],
        }
