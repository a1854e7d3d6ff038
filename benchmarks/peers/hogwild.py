# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peer: Hogwild; processes update one model in shared memory without locks.

Recht et al., "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
Descent", 2011. The optimizer's state is shared as well.
"""

from __future__ import annotations

import torch
from job import Job
from torch import multiprocessing, nn

from peers.common import CtrModel, TorchTrainee, adagrad, measure


def _train_shared(
    rank: int, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    torch.set_num_threads(job.threads)
    measure(job, rank, TorchTrainee(job, model, optimizer))


def train(job: Job, rank: int) -> None:
    """Trains as trainer 0 and starts the others, daemons that end with this process."""
    torch.set_num_threads(job.threads)
    model = CtrModel(job).share_memory()
    optimizer = adagrad(job, model.parameters())
    optimizer.share_memory()
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(
            target=_train_shared, args=(r, job, model, optimizer), daemon=True
        )
        for r in range(1, job.trainers)
    ]
    for process in others:
        process.start()
    _train_shared(rank, job, model, optimizer)
    for process in others:
        process.join(job.deadline_s)
        if process.exitcode != 0:
            raise RuntimeError(f"a Hogwild trainer ended with {process.exitcode}")
