# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peer: plain torch, one process; ``nn.Embedding(sparse=True)`` and ``Adagrad``."""

from __future__ import annotations

import torch
from job import Job

from peers.common import CtrModel, TorchTrainee, adagrad, measure


def train(job: Job, rank: int) -> None:
    torch.set_num_threads(job.threads)
    model = CtrModel(job).to(job.device)
    measure(job, rank, TorchTrainee(job, model, adagrad(job, model.parameters())))
