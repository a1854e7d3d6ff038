# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""This package's replicas: threads of one process, under torch's own optimizer or ours.

A step takes ``--batch`` samples per replica, as one of as many trainers would.
"""

from __future__ import annotations

from typing import Any

import torch
from job import Job
from torch import nn

import torch_cpudist as cpudist
from peers.common import Batch, CtrModel, TorchTrainee, adagrad, measure


class ReplicaTrainee(TorchTrainee):
    """The plain model, trained by an executor."""

    def __init__(
        self, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(job, model, optimizer)
        self._executor = cpudist.ReplicaExecutor(
            model, self._loss_of, optimizer, job.replicas, num_threads=job.threads
        )

    def _loss_of(self, model: nn.Module, part: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.job.bf16):
            logits = model(part.ids, part.dense)
        return nn.functional.binary_cross_entropy_with_logits(
            logits.float(), part.labels
        )

    def learn(self, batch: Batch) -> float:
        return float(self._executor.join(self._executor.run(batch)).mean())

    def counters(self) -> dict[str, float]:
        if not isinstance(self.optimizer, cpudist.DistributedOptimizer):
            return {"bytes": 0.0}
        stats = self.optimizer.stats()
        moved = stats["bytes_sent"] + stats["bytes_received"]
        return {"bytes": float(moved), "wait_s": float(stats["wait_s"])}

    def settle(self) -> None:
        if isinstance(self.optimizer, cpudist.DistributedOptimizer):
            self.optimizer.flush(pull="dense")


def train(job: Job, rank: int) -> None:
    """Trains as the only process; ``strategy`` is empty under torch's optimizer."""
    torch.set_num_threads(job.threads)
    cpudist.init()
    model = CtrModel(job)
    optimizer: Any = adagrad(job, model.parameters())
    if job.strategy:
        optimizer = cpudist.DistributedOptimizer(optimizer, model, job.strategy)
    measure(job, rank, ReplicaTrainee(job, model, optimizer))
    cpudist.shutdown()
