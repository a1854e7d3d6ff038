# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small embeddings, and how the tests of tables train them."""

from __future__ import annotations

import torch
from sync_cases import copy_of, largest_difference, run
from torch import nn

import torch_cpudist as cpudist

ROWS, DIM = 12, 3


def ids(*values):
    return torch.tensor(values)


def weight_of(module):
    with torch.no_grad():
        values = torch.arange(module.weight.numel(), dtype=torch.float32)
        module.weight.copy_((values.sin()).reshape(module.weight.shape))
    return module


def embedding(**options):
    return weight_of(nn.Embedding(ROWS, DIM, sparse=True, **options))


def bag(**options):
    return weight_of(nn.EmbeddingBag(ROWS, DIM, sparse=True, **options))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def wrap(model, optimizer=None):
    return cpudist.DistributedOptimizer(optimizer or sgd(model), model)


def alone(fn, **options):
    """Runs ``fn`` as the only trainer, on one server of its own."""
    return run(lambda context: fn(), 1, **options)[0]


def train(model, optimizer, batches, forward):
    for batch in batches:
        optimizer.zero_grad()
        forward(model, batch).square().sum().backward()
        optimizer.step()


def assert_trains_like_torch(make, batches, forward=lambda model, batch: model(batch)):
    """Two trainers with the same batches and two servers, against plain torch."""
    plain = make()
    train(plain, sgd(plain), batches, forward)

    def body(context):
        model = make()
        optimizer = wrap(model)
        # What was there must not be used: every row has to come from a server.
        with torch.no_grad():
            for table in optimizer.trained.placement.tables:
                table.found.weight.fill_(torch.nan)
        optimizer.trained.accept_changes()
        train(model, optimizer, batches, forward)
        optimizer.flush()
        return copy_of(model)

    for state in run(body, 2, 2):
        assert largest_difference(state, copy_of(plain)) <= 1e-6
