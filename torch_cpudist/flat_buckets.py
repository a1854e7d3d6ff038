# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Dense values laid out one after the other, for messages of a useful size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torch_cpudist.placement import DenseParameter

# torch's DistributedDataParallel has found this to be enough.
DEFAULT_BYTES = 25 << 20
# Columns of the rows that a norm is taken over first; see ``squared_norm``.
_NORM_WIDTH = 4096


@dataclass
class Bucket:
    """Parameters of one dtype that travel together.

    Attributes:
        entries: the parameters.
        offsets: where each begins, in elements.
        size: elements of all.
        flat: their values, ``[size]``; allocated by the first use.
    """

    dtype: torch.dtype
    entries: list[DenseParameter] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0
    _flat: torch.Tensor | None = None

    def add(self, entry: DenseParameter) -> None:
        """Appends a parameter."""
        self.entries.append(entry)
        self.offsets.append(self.size)
        self.size += entry.parameter.numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of ``flat``."""
        return self.size * self.dtype.itemsize

    @property
    def flat(self) -> torch.Tensor:
        """The memory of all."""
        if self._flat is None:
            self._flat = torch.zeros(self.size, dtype=self.dtype, device="cpu")
        return self._flat

    def view(self, i: int) -> torch.Tensor:
        """The memory of the ``i``-th parameter, in its shape."""
        entry, begin = self.entries[i], self.offsets[i]
        part = self.flat[begin : begin + entry.parameter.numel()]
        return part.view(entry.shape)


def squared_norm(flat: torch.Tensor) -> float:
    """Sum of squares of ``[n]``, the same bits for any number of torch's threads."""
    whole = flat.numel() - flat.numel() % _NORM_WIDTH
    total = 0.0
    for part in (flat[:whole].view(-1, _NORM_WIDTH), flat[None, whole:]):
        if part.numel():
            norms = torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
            total += sum(norm * norm for norm in norms.tolist())
    return total


def plan(entries: Sequence[DenseParameter], bucket_bytes: int) -> list[Bucket]:
    """Deals parameters to buckets, the last first: so backward has their gradients.

    Args:
        entries: the parameters.
        bucket_bytes: of a bucket, at most; a larger parameter has one of its own.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[torch.dtype, Bucket] = {}
    for entry in reversed(entries):
        bucket = open_buckets.get(entry.dtype)
        needed = entry.parameter.numel() * entry.dtype.itemsize
        if bucket is None or bucket.size_bytes + needed > bucket_bytes:
            bucket = open_buckets[entry.dtype] = Bucket(entry.dtype)
            buckets.append(bucket)
        bucket.add(entry)
    return buckets
