# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Training of async_cases' model in groups whose means of two are whole numbers."""

from __future__ import annotations

import torch
from async_cases import Counting, gradient_of
from sync_cases import copy_of

import torch_cpudist as cpudist


def halves(group, **options):
    sharding = cpudist.Sharding(min_block_size=8)
    return cpudist.HalfAsync(group=group, sharding=sharding, **options)


def backward(model, seed):
    """Even gradients, of which means of two are whole numbers."""
    ids, rows, dense = gradient_of(seed)
    ((model.table(ids) * rows * 2).sum() + (model.dense * dense * 2).sum()).backward()


def expected_of(weights):
    """Counting's final weights if each seed's even gradient counts with its weight."""
    model = Counting()
    with torch.no_grad():
        for seed, weight in weights.items():
            ids, rows, dense = gradient_of(seed)
            model.table.weight.index_add_(0, ids, -rows * 2 * weight)
            model.dense -= dense * 2 * weight
    return dict(model.state_dict())


def step(optimizer, model, seed):
    optimizer.zero_grad()
    backward(model, seed)
    optimizer.step()


def take_final(context, optimizer, model):
    context.barrier()
    optimizer.flush()
    return copy_of(model)
