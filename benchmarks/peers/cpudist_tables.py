# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""This package on the model of the case ``ctr`` with a table for each slot."""

from __future__ import annotations

import ctr_data
import torch
from job import Job
from torch import nn

import torch_cpudist as cpudist
from peers.common import EMBEDDING_STD, adagrad, make_mlp, measure, spec_of
from peers.cpudist_rank import CpudistTrainee, place_tables, serve, strategy_of


class SlotTables(nn.Module):
    """A sparse table per slot, joined with the dense features, then an MLP."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        spec = spec_of(job)
        torch.manual_seed(job.seed)
        self.mlp = make_mlp(spec, job.dim)
        self.tables = nn.ModuleList(
            nn.Embedding(
                int(rows),
                job.dim,
                sparse=True,
                _weight=torch.empty(int(rows), job.dim).normal_(std=EMBEDDING_STD),
            )
            for rows in ctr_data.slot_sizes(spec)
        )

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Returns logits [batch] for each slot's own ``ids`` and ``dense``."""
        rows = [table(ids[:, slot]) for slot, table in enumerate(self.tables)]
        return self.mlp(torch.cat([*rows, dense], dim=1)).squeeze(1)


class SlotTrainee(CpudistTrainee):
    """Ids of the data count through all slots; those of the model within each."""

    def logits(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        offsets = ctr_data.slot_offsets(spec_of(self.job))
        found: torch.Tensor = self.model(ids - torch.as_tensor(offsets), dense)
        return found


def train(job: Job, rank: int) -> None:
    """Trains or serves; ``init()`` says which."""
    cpudist.init()
    if cpudist.is_server():
        serve(job)
    else:
        model = SlotTables(job)
        place_tables(model, job.strategy)
        strategy, _ = strategy_of(job.strategy)
        optimizer = cpudist.DistributedOptimizer(
            adagrad(job, model.parameters()), model, strategy=strategy
        )
        # The trainee's class says the model of one table, of which it uses no more.
        trainee = SlotTrainee(job, model, optimizer)  # type: ignore[arg-type]
        measure(job, cpudist.trainer_rank(), trainee)
    cpudist.shutdown()
