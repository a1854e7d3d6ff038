# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model of remote tables whose gradients are whole numbers, and where it ends."""

from __future__ import annotations

import torch
from geo_cases import geo, seeds_of
from remote_cases import DIM, ROWS, remote, rows_now, wrap
from sync_cases import run
from torch import nn


class Rows(nn.Module):
    """A table and a bag, which begin at zero, and a dense vector."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(ROWS, DIM)
        self.second = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=0)
        self.vector = nn.Parameter(torch.zeros(30))
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.second.weight)


def batch(seed):
    """Ids of both tables and the gradients of their rows, whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(2):
        ids = torch.randint(1, ROWS, (5,), generator=generator)
        values = torch.randint(-3, 4, (5, DIM), generator=generator).float()
        found.append((ids, values))
    return found


def push(model, opt, seed):
    """A step whose gradients are those of ``batch``."""
    (ids, values), (more, others) = batch(seed)
    opt.zero_grad()
    loss = (model.first(ids) * values).sum()
    loss = loss + (model.second(more.reshape(-1, 1)) * others).sum()
    (loss + model.vector.sum()).backward()
    opt.step()


def moved(seeds):
    """The rows after SGD with a rate of 1 over these steps."""
    rows = {name: torch.zeros(ROWS, DIM) for name in ("first.weight", "second.weight")}
    for seed in seeds:
        for name, (ids, values) in zip(rows, batch(seed), strict=True):
            rows[name].index_add_(0, ids, -values)
    return rows


def after_all_left(trainers, servers, steps, **options):
    """Every trainer's rows when all have left, and what its exchanges say."""

    # Built one after the other: while one is built remote, so is every other.
    models = [remote(Rows) for _ in range(trainers)]

    def body(context):
        model = models[context.trainer_rank]
        # Each exchange is over when the next begins, however slow the servers are.
        opt = wrap(model, geo(3, exchange_budget=None, **options))
        rank = context.trainer_rank
        for seed in seeds_of(rank, steps(rank)):
            push(model, opt, seed)
        opt.leave()
        context.barrier()
        opt.flush()
        return rows_now(opt), opt.stats()["exchange"], model.vector.detach().clone()

    results = run(body, trainers, servers)
    seeds = [seed for rank in range(trainers) for seed in seeds_of(rank, steps(rank))]
    return results, moved(seeds), -float(len(seeds))
