# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs with a table of any key, saved and resumed."""

from __future__ import annotations

import torch
from open_cases import DIM, counted, pushes, read, step
from snapshot_parity import seeing
from sync_cases import run

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot

STEPS, STOP = 14, 8
UNIFORM = cpudist.Uniform(-1, 1)


def module_of(seed: int = 1, **told) -> cpudist.Embedding:
    return cpudist.Embedding(DIM, initial=UNIFORM, seed=seed, **told)


def ranks(body, folder, modules, servers):
    """``body`` on every trainer, with its module and its optimizer, resumed."""

    def one(context):
        module = modules[context.trainer_rank]
        opt = cpudist.DistributedOptimizer(
            torch.optim.Adagrad(module.parameters(), lr=0.5), module
        )
        return body(opt, module, context.trainer_rank)

    return run(one, len(modules), servers, variables=seeing(folder))


def train(opt, module, rank, first, last):
    for push in pushes(STEPS, rank, size=3)[first:last]:
        step(opt, module, push)


def assert_goes_on(folder, trainers, servers, then, **told):
    """Trains whole, and in two parts, of which the second begins at a snapshot."""

    def made(seed=1):
        return [module_of(seed, **told) for _ in range(trainers)]

    def whole(opt, module, rank):
        opt.resume(folder / "whole")
        train(opt, module, rank, 0, STEPS)
        return read(module), counted()["rows"]

    def first(opt, module, rank):
        opt.resume(folder / "cut", every_steps=STOP)
        train(opt, module, rank, 0, STOP)

    def second(opt, module, rank):
        started = opt.resume(folder / "cut")
        assert started.step == STOP
        assert started.missing == {}
        train(opt, module, rank, STOP, STEPS)
        return read(module), counted()["rows"]

    expected = ranks(whole, folder / "whole", made(), servers)
    ranks(first, folder / "cut", made(), servers)
    # The seed of the snapshot counts, for keys that nobody has trained, too.
    found = ranks(second, folder / "cut", made(seed=2), then)
    for (rows, count), (others, expected_count) in zip(found, expected, strict=True):
        assert torch.equal(rows, others)
        assert count == expected_count
    (name,) = Directory(folder / "cut").names()
    snapshot = Snapshot(folder / "cut" / name)
    assert snapshot.verify() == []
    assert snapshot.manifest.tables[0].open is not None
    assert snapshot.manifest.tables[0].open.eviction == told.get("eviction")
