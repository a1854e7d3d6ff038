# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sums of metrics over all trainers of a run."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from torch_cpudist.errors import (
    ConfigMismatchError,
    ConfigurationError,
    InternalError,
    InvalidArgumentError,
    NotInitializedError,
)
from torch_cpudist.launch import context as contexts

if TYPE_CHECKING:
    from torch_cpudist.metrics.base import Metric

    MetricT = TypeVar("MetricT", bound=Metric[Any])

_WHAT = "compute_all() of a metric"


def over_trainers(metric: MetricT) -> MetricT:
    """A metric that has the samples of all trainers; with one trainer, the same one.

    States are merged in rank order, so that all trainers find the same bits.

    Raises:
        Error: see ``Metric.compute_all``.
    """
    context = _context()
    if context is None:
        return metric
    said = repr(metric)
    words = metric.packed()
    group = context.trainers_group()
    sizes = group.gather(
        context, _WHAT, np.array([len(words), zlib.crc32(said.encode())])
    )
    other = next((r for r, one in enumerate(sizes) if one[1] != sizes[0][1]), None)
    if other is not None:
        raise ConfigMismatchError(
            f"{_WHAT}: trainer {other} has other metrics than trainer 0, or other "
            f"options; trainer {context.trainer_rank} has {said}. Make equal ones on "
            "all, and call compute_all() in the same order."
        )
    lengths = [int(one[0]) for one in sizes]
    padded = np.zeros(max(lengths), np.int64)
    padded[: len(words)] = words
    total = metric.empty()
    for length, part in zip(lengths, group.gather(context, _WHAT, padded), strict=True):
        try:
            total.merge_packed(part[:length])
        except InvalidArgumentError as error:
            raise InternalError(f"{_WHAT}: {error}") from error
    return total


def _context() -> contexts.Context | None:
    """The calling thread's, if it has other trainers."""
    context = contexts.last()
    if context is None:
        if contexts.any_open():
            raise NotInitializedError(
                f"{_WHAT}: init() was called in another thread than this one, which "
                "would count its own samples only. Use: with context: (init() returns "
                "the context), or compute() for the samples of this trainer."
            )
        return None
    if context.role != "trainer":
        raise ConfigurationError(
            f"{_WHAT} on rank {context.rank}, a dedicated server: metrics are the "
            "trainers'."
        )
    if context.trainer_count == 1 and context.environment.group is None:
        return None
    context.check_usable()
    if context.environment.group is not None:
        raise ConfigurationError(
            f"{_WHAT} gathers over torch.distributed, whose group is that of one "
            "torchrun job, but CPUDIST_ROLE starts trainers in jobs of their own. Save "
            "state_dict() of every trainer's metric and merge() them."
        )
    return context
