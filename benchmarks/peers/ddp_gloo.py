# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peer: DistributedDataParallel over gloo, which all-gathers the sparse gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from job import Job
from torch.nn.parallel import DistributedDataParallel

from peers.common import CtrModel, TorchTrainee, adagrad, measure


def train(job: Job, rank: int) -> None:
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    try:
        model = DistributedDataParallel(CtrModel(job))
        measure(job, rank, TorchTrainee(job, model, adagrad(job, model.parameters())))
    finally:
        dist.destroy_process_group()
