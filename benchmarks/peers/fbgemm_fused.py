# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Peer: one process on FBGEMM's embedding, whose backward applies Adagrad at once."""

from __future__ import annotations

import torch
from ctr_data import slot_offsets, slot_sizes
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from job import Job
from torch import nn

from peers.common import (
    ADAGRAD_EPS,
    EMBEDDING_STD,
    TorchTrainee,
    adagrad,
    make_mlp,
    measure,
    spec_of,
)


class FusedCtrModel(nn.Module):
    """The same network over one fused table per slot; ids are laid out slot by slot."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        spec = spec_of(job)
        torch.manual_seed(job.seed)
        self.mlp = make_mlp(spec, job.dim)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (rows, job.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for rows in slot_sizes(spec)
            ],
            optimizer=EmbOptimType.EXACT_ADAGRAD,
            learning_rate=job.lr,
            eps=ADAGRAD_EPS,
            weights_precision=SparseType.FP32,
        )
        for weight in self.tables.split_embedding_weights():
            weight.normal_(std=EMBEDDING_STD)
        self._first_ids = torch.from_numpy(slot_offsets(spec))

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch] for ``ids`` [batch, slots] and ``dense``."""
        indices = (ids - self._first_ids).t().flatten()
        rows = self.tables(indices, torch.arange(indices.numel() + 1))
        return self.mlp(torch.cat([rows, dense], dim=1)).squeeze(1)


def train(job: Job, rank: int) -> None:
    torch.set_num_threads(job.threads)
    model = FusedCtrModel(job)
    # The kernel updates the tables in backward; the optimizer has the rest.
    measure(job, rank, TorchTrainee(job, model, adagrad(job, model.mlp.parameters())))
