# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The smallest complete training script: synthetic clicks, one table, one network.

python examples/quickstart/quickstart.py
torchrun --standalone --nproc-per-node=2 examples/quickstart/quickstart.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import torch_cpudist as cpudist

ROWS, SLOTS, DIM, BATCH, STEPS = 20_000, 8, 8, 512, 300


class ClickModel(nn.Module):
    """Embeds eight ids and scores them."""

    def __init__(self) -> None:
        """Make the table and the network."""
        super().__init__()
        self.embedding = nn.Embedding(ROWS, DIM)
        first, last = nn.Linear(SLOTS * DIM, 32), nn.Linear(32, 1)
        self.network = nn.Sequential(first, nn.ReLU(), last)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits ``[n]`` for ids ``[n, SLOTS]``."""
        logits: torch.Tensor = self.network(self.embedding(ids).flatten(1))
        return logits.squeeze(1)


def clicks(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ids, few of them frequent; even ids are clicked more often."""
    draw = torch.rand(BATCH, SLOTS, generator=generator)
    ids = (ROWS * draw**8).long()
    chance = torch.sigmoid(1.5 * (1 - 2 * (ids % 2)).sum(dim=1))
    return ids, (torch.rand(BATCH, generator=generator) < chance).float()


cpudist.init()
if cpudist.is_server():
    cpudist.serve()
else:
    model = cpudist.shard_tables(ClickModel(), min_rows=10_000)
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.05)
    opt = cpudist.DistributedOptimizer(adagrad, model, strategy=cpudist.Sync())
    generator = torch.Generator().manual_seed(cpudist.trainer_rank())
    for ids, clicked in (clicks(generator) for _ in range(STEPS)):
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(ids), clicked)
        loss.backward()
        opt.step()
    cpudist.barrier()  # everybody is through
    opt.flush()  # and model.state_dict() the trained model
    print(f"trainer {cpudist.trainer_rank()}: log loss {loss.item():.3f}")
cpudist.shutdown()
