# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models, batches and references of the tests of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sync_cases import Model, Optimizer, copy_of, largest_difference
from torch import nn

import torch_cpudist as cpudist

ROWS, SLOTS, DIM = 30, 3, 4
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch_of(step: int, samples: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Ids, dense features and targets of one step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (samples, SLOTS), generator=generator)
    dense = torch.randn(samples, DIM, generator=generator).to(dtype)
    return ids, dense, torch.randn(samples, generator=generator).to(dtype)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    ids, dense, target = batch
    return (model(ids, dense) - target).square().mean()


def plainly(
    build: Callable[[nn.Module], list[Optimizer]],
    samples: Callable[[int], int],
    dtype: torch.dtype,
    table: bool,
    parts: int = 1,
    steps: int = 10,
) -> dict[str, torch.Tensor]:
    """One process, plain torch; a step is the sum of ``parts`` weighed parts."""
    model = Model(dtype, table)
    optimizers = build(model)
    for step in range(steps):
        model.zero_grad()
        batch = batch_of(step, samples(step), dtype)
        cut = [torch.tensor_split(tensor, parts) for tensor in batch]
        for part in zip(*cut, strict=True):
            share = len(part[2]) / samples(step)
            (loss_of(model, part) * share).backward()
        for optimizer in optimizers:
            optimizer.step()
    return copy_of(model)


def allowed(
    build: Callable[[nn.Module], list[Optimizer]],
    samples: Callable[[int], int],
    dtype: torch.dtype,
    table: bool,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], float]:
    """One process on the joined batch, and the difference that is allowed to it.

    1e-6; in float32 at least 4 x torch's own between the batch and its parts.
    """
    whole = plainly(build, samples, dtype, table, **options)
    if dtype == torch.float64:
        return whole, 1e-6
    cut = plainly(build, samples, dtype, table, parts=2, **options)
    return whole, max(1e-6, 4 * largest_difference(whole, cut))


def by_replicas(
    build: Callable[[nn.Module], list[Optimizer]],
    samples: Callable[[int], int],
    dtype: torch.dtype,
    table: bool,
    replicas: int = 2,
    steps: int = 10,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """The same by an executor."""
    model = Model(dtype, table)
    with cpudist.ReplicaExecutor(
        model, loss_of, build(model), replicas, num_threads=1, **options
    ) as executor:
        for step in range(steps):
            executor.run(batch_of(step, samples(step), dtype))
    return copy_of(model)
