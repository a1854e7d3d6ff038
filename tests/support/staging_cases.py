# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model with lookups of all kinds, trained on any device, staged or not."""

from __future__ import annotations

from typing import Any

import torch
from sync_cases import copy_of, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.machine import staging

ROWS, DIM, STEPS = 20, 4, 6


class Lookups(nn.Module):
    """Embeddings and bags of every form, a shared weight, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        options: Any = {"sparse": True}
        self.plain = nn.Embedding(ROWS, DIM, **options)
        self.padded = nn.Embedding(ROWS, DIM, padding_idx=3, **options)
        self.shared = nn.EmbeddingBag(ROWS, DIM, mode="sum", **options)
        self.shared.weight = self.plain.weight
        self.sums = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=2, **options)
        self.means = nn.EmbeddingBag(
            ROWS, DIM, mode="mean", include_last_offset=True, **options
        )
        self.first = nn.Linear(DIM, 5)
        self.last = nn.Linear(5, 1, dtype=torch.float32)
        self.seldom = nn.Parameter(torch.ones(3, 2).t())
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values * 0.5)

    def forward(self, step: int, ids: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 3, 3, ids.numel()], device=ids.device)
        flat = ids.reshape(-1)
        weights = torch.linspace(0.5, 1.5, ids.numel(), device=ids.device)
        found = self.plain(ids).sum(1) + self.plain(ids[:, 0].int())
        found = found + self.padded(ids).sum(1) + self.padded(ids[:0]).sum()
        found = found + self.shared(ids, per_sample_weights=weights.view(ids.shape))
        found = found + self.sums(flat, offsets[:-1])[:1] + self.means(flat, offsets)[0]
        found = self.last(torch.tanh(self.first(found))).squeeze(1).float()
        return found * self.seldom.sum() if step % 2 else found


def ids_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(ROWS, (3, 4), generator=generator)


def train(
    context: cpudist.Context,
    strategy: Any,
    device: Any = "cpu",
    prefetch: bool = False,
    ids_there: bool = False,
    exact: bool = True,
) -> dict[str, torch.Tensor]:
    """Trains with accumulation and unused parameters; the final values.

    Unless ``exact``, without what makes much of a small difference: autocast, and
    Adagrad, whose first step is as large whatever the gradient is.
    """
    model = Lookups().to(device)
    rule = torch.optim.Adagrad if exact else torch.optim.SGD
    inner = rule(model.parameters(), lr=0.1)
    optimizer = cpudist.DistributedOptimizer(inner, model, strategy)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(1 + step % 2):
            ids = ids_of(STEPS * part + step, context.trainer_rank)
            if prefetch:
                optimizer.prefetch({model.plain: ids, model.sums: ids})
            where = ids.to(device) if ids_there else ids
            kind, low = torch.device(device).type, exact and step == 2
            with torch.autocast(kind, torch.bfloat16, low):
                model(step, where).square().mean().backward()
        optimizer.step()
    cpudist.barrier()
    optimizer.flush()
    return copy_of(model)


def trained(strategy: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    """What two trainers and two servers have in the end."""
    return run(lambda context: train(context, strategy, **options), 2, 2)


def stage_always(monkeypatch: Any) -> None:
    """Makes everything that is for a device run for the CPU, too."""
    monkeypatch.setattr(staging, "needed", lambda device: True)
