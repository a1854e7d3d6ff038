# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How many replicas there are, where they run, and what memory they take."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from torch_cpudist.launch import context
from torch_cpudist.launch.torch_threads import threads_of
from torch_cpudist.machine import topology
from torch_cpudist.optimizer.distributed import DistributedOptimizer
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.replicas.updates import CopiedUpdate, Update
from torch_cpudist.settings.fields import with_environment
from torch_cpudist.settings.replicas import Replicas


@dataclass(frozen=True)
class Place:
    """Where the replicas of an executor run.

    Attributes:
        count: how many.
        reduce: ``"reduce"`` or ``"allreduce"``.
        num_threads: torch threads of each.
        share: physical cores of this process.
        cores: of each replica, if it is pinned.
        trainer: whose they are.
    """

    count: int
    reduce: str
    num_threads: int
    share: int
    cores: tuple[tuple[int, ...], ...] | None
    trainer: int

    def __str__(self) -> str:
        """For the log."""
        pinned = "" if self.cores is None else f", pinned to cores {list(self.cores)}"
        return (
            f"ReplicaExecutor: {self.count} replicas ({self.reduce}) of "
            f"{self.num_threads} torch threads on {self.share} cores{pinned}"
        )


def find(
    optimizers: Sequence[Optimizer],
    count: int | None,
    reduce: str | None,
    num_threads: int | None,
) -> Place:
    """Settles settings: environment over argument over strategy over default.

    Raises:
        ConfigurationError: one is out of range, or replicas cannot be pinned.
    """
    made, share, trainer = context.place()
    base = Replicas()
    if optimizers and isinstance(optimizers[0], DistributedOptimizer):
        base = optimizers[0].strategy.replicas
    given = Replicas(
        base.count if count is None else count,
        base.reduce if reduce is None else reduce,
        base.num_threads if num_threads is None else num_threads,
    )
    settled = with_environment(given, made.values)
    number = settled.count or share
    threads = settled.num_threads or made.threads or threads_of(share, 1, number)
    cores = None
    if made.pin:
        mine = topology.read(os.sched_getaffinity(0))
        cores = tuple(topology.deal(mine, number, "replicas of this rank"))
    return Place(number, settled.reduce, threads, share, cores, trainer)


def _bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes behind tensors, memory that several share counted once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        sparse = tensor.layout == torch.sparse_coo
        parts = (tensor._indices(), tensor._values()) if sparse else (tensor,)
        for part in parts:
            sizes[part.data_ptr()] = part.numel() * part.element_size()
    return sum(sizes.values())


def memory(models: ReplicaModels, update: Update) -> dict[str, int]:
    """Bytes of parameters, copies, gradients, state; see the executor's ``stats``."""
    views = [view for own in models.views for view in own]
    everything = [*models.parameters, *views]
    optimizers = list(update.optimizers)
    if isinstance(update, CopiedUpdate):
        optimizers += update.copies()
    state: list[torch.Tensor] = []
    for optimizer in optimizers:
        inners: Sequence[Optimizer] = [optimizer]
        if isinstance(optimizer, DistributedOptimizer):
            inners = optimizer.inners
            state += optimizer.driver.keeper.held()
        kept = (values for inner in inners for values in inner.state.values())
        state += [v for one in kept for v in one.values() if torch.is_tensor(v)]
    parameters = _bytes_of(models.parameters)
    return {
        "parameter_bytes": parameters,
        "copy_bytes": _bytes_of(everything) - parameters,
        "gradient_bytes": _bytes_of(p.grad for p in everything),
        "state_bytes": _bytes_of(state),
    }
