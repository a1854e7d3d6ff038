# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A model of tables, and the same steps by replicas and by plain torch."""

from __future__ import annotations

import threading

import pytest
import torch
from sync_cases import copy_of, largest_difference
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.ops.tables import TablesStep

ROWS, SLOTS, DIM = 40, 3, 5
MODES = pytest.mark.parametrize("reduce", ["reduce", "allreduce"])


class Tables(nn.Module):
    """Two tables, one of which some batches do not use, and a dense layer."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Embedding(ROWS, DIM, sparse=True, dtype=dtype)
        self.second = nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum", dtype=dtype)
        self.out = nn.Linear(DIM, 1, dtype=dtype)

    def forward(self, ids, both):
        found = self.first(ids).sum(1)
        if both:
            found = found + self.second(ids)
        return self.out(found).squeeze(1)

    def tables(self):
        return [self.first.weight, self.second.weight]


def batch_of(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    samples = (8, 5, 9)[step % 3]
    ids = torch.randint(0, ROWS // 2, (samples, SLOTS), generator=generator)
    target = torch.randn(samples, generator=generator).to(dtype)
    return ids, target, step % 3 != 1


def loss_of(model, batch):
    ids, target, both = batch
    return (model(ids, both) - target).square().mean()


def cut(batch, parts):
    """Along dim 0; numbers go to all."""
    ids, target, both = batch
    pairs = zip(ids.tensor_split(parts), target.tensor_split(parts), strict=True)
    return [(i, t, both) for i, t in pairs]


class Calls:
    """Notes the threads that step rows of tables by the kernels, once a table."""

    def __init__(self, monkeypatch):
        self.threads, self.steps = [], []
        real = TablesStep.run

        def run(step, *arguments, **options):
            found = real(step, *arguments, **options)
            name = threading.current_thread().name
            self.threads += [name for keys, _ in found if len(keys)]
            self.steps.append(name)
            return found

        monkeypatch.setattr(TablesStep, "run", run)


def both(make, build, loss, batches, reduce="reduce", replicas=2, between=None):
    """The same steps by replicas and by plain torch; returns both models."""
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = build(models[0]), build(models[1])
    with cpudist.ReplicaExecutor(
        models[0], loss, ours, replicas, reduce=reduce, num_threads=1
    ) as executor:
        for step, (parts, whole) in enumerate(batches):
            executor.run_parts(parts)
            for parameter in models[1].parameters():
                parameter.grad = None
            loss(models[1], whole).backward()
            for optimizer in theirs:
                optimizer.step()
            if between is not None:
                between(step, models[0], ours)
                between(step, models[1], theirs)
    return models


def assert_equal(models, difference=1e-12):
    assert largest_difference(*map(copy_of, models)) < difference
