# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""This package: a rank that trains, serves or does both, as its environment says."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from job import Job

import torch_cpudist as cpudist
from peers.common import CtrModel, TorchTrainee, adagrad, measure


class CpudistTrainee(TorchTrainee):
    """The plain model and optimizer, wrapped."""

    optimizer: cpudist.DistributedOptimizer

    def counters(self) -> dict[str, float]:
        stats = self.optimizer.stats()
        # What a server sends, some trainer receives: every byte is counted once.
        moved = stats["bytes_sent"] + stats["bytes_received"]
        if "collective" in stats:
            moved += stats["collective"]["sent_bytes"]
        return {"bytes": float(moved), "wait_s": float(stats["wait_s"])}

    def settle(self) -> None:
        # The evaluation's lookups pull their rows themselves.
        self.optimizer.flush(pull="dense")

    def logits(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        # Under bf16 the model brings its own autocast, and returns float32.
        found: torch.Tensor = self.model(ids, dense)
        return found


def strategy_of(text: str) -> cpudist.Strategy:
    """Reads a strategy as ``NAME[:FIELD=NUMBER]...``: ``geo:push_every=400``."""
    name, *options = text.split(":")
    pairs = (option.partition("=")[::2] for option in options)
    return cpudist.strategy(
        name, **{key: float(v) if "." in v else int(v) for key, v in pairs}
    )


def train(job: Job, rank: int) -> None:
    """Trains or serves; ``rank`` counts in worlds of one, else ``init()`` says it."""
    cpudist.init()
    if cpudist.is_server():
        (Path(job.run_dir) / f"server.{os.getpid()}").touch()
        cpudist.serve()
    else:
        model = CtrModel(job)
        optimizer = cpudist.DistributedOptimizer(
            adagrad(job, model.parameters()),
            model,
            strategy=strategy_of(job.strategy),
        )
        if job.bf16:
            # As the other rows, whose autocast asks no CPU whether it is worth it.
            cpudist.optimize(model, optimizer, force=True)
        if cpudist.trainer_count() > 1:
            rank = cpudist.trainer_rank()
        measure(job, rank, CpudistTrainee(job, model, optimizer))
    cpudist.shutdown()
