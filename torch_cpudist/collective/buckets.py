# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Dense values laid out one after the other, for messages of a useful size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_cpudist.machine.device import CPU
from torch_cpudist.model.placement import DenseParameter

# Smaller halves cost more than their overlap with backward brings.
LEAST_BYTES = 2 << 20
# Columns of the rows that a norm is taken over first; see ``squared_norm``.
_NORM_WIDTH = 4096


@dataclass(frozen=True)
class Piece:
    """A parameter, or some of its elements, in a bucket.

    Attributes:
        entry: the parameter.
        begin, count: which of its elements, in order; of one that is not contiguous
            always all.
        shape: of the piece.
        owner: the trainer that updates it, where only one does.
    """

    entry: DenseParameter
    begin: int
    count: int
    shape: torch.Size
    owner: int = 0

    @property
    def whole(self) -> bool:
        """Whether this is all of the parameter."""
        return self.count == self.entry.parameter.numel()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor of the parameter's shape, contiguous unless whole."""
        if self.whole:
            return tensor
        return tensor.view(-1)[self.begin : self.begin + self.count].view(self.shape)


def whole(entry: DenseParameter, owner: int = 0) -> Piece:
    """A parameter in one piece."""
    return Piece(entry, 0, entry.parameter.numel(), entry.shape, owner)


@dataclass
class Bucket:
    """Pieces of one dtype that travel together.

    Attributes:
        pieces: of parameters.
        offsets: where each begins, in elements.
        size: elements of all.
        room: elements behind them that travel too.
        device: of the parameters.
    """

    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0
    room: int = 0
    device: torch.device = CPU
    _storage: torch.Tensor | None = None

    def add(self, piece: Piece) -> None:
        """Appends a piece."""
        self.pieces.append(piece)
        self.offsets.append(self.size)
        self.size += piece.count

    @property
    def size_bytes(self) -> int:
        """Bytes of ``flat``."""
        return self.size * self.dtype.itemsize

    def make_room(self, elements: int) -> None:
        """Has so many more elements travel, before the first use; see ``behind``."""
        self.room = elements

    def allocate(self, zeros: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        """Takes all memory from ``zeros``, before the first use."""
        self._storage = zeros(self.size + self.room, self.dtype)

    @property
    def storage(self) -> torch.Tensor:
        """All memory, ``[size + room]``; allocated by the first use."""
        if self._storage is None:
            elements = self.size + self.room
            self._storage = torch.zeros(elements, dtype=self.dtype, device=self.device)
        return self._storage

    @property
    def flat(self) -> torch.Tensor:
        """The values of all pieces, ``[size]``."""
        return self.storage[: self.size]

    @property
    def behind(self) -> torch.Tensor:
        """The elements behind the pieces, ``[room]``."""
        return self.storage[self.size :]

    def view(self, i: int) -> torch.Tensor:
        """The memory of the ``i``-th piece, in its shape."""
        begin, piece = self.offsets[i], self.pieces[i]
        return self.flat[begin : begin + piece.count].view(piece.shape)

    def segments(self) -> list[tuple[int, int, int]]:
        """Owner, begin and end of each run of pieces with one owner."""
        runs: list[tuple[int, int, int]] = []
        for piece, begin in zip(self.pieces, self.offsets, strict=True):
            end = begin + piece.count
            if runs and runs[-1][0] == piece.owner:
                runs[-1] = (piece.owner, runs[-1][1], end)
            else:
                runs.append((piece.owner, begin, end))
        return runs


def squared_norm(flat: torch.Tensor) -> float:
    """Sum of squares of ``[n]``, the same bits for any number of torch's threads."""
    whole = flat.numel() - flat.numel() % _NORM_WIDTH
    total = 0.0
    for part in (flat[:whole].view(-1, _NORM_WIDTH), flat[None, whole:]):
        if part.numel():
            norms = torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
            total += sum(norm * norm for norm in norms.tolist())
    return total


def plan(
    entries: Sequence[DenseParameter], bucket_bytes: int, halves: bool = False
) -> list[Bucket]:
    """Deals parameters to buckets, the last first: so backward has their gradients.

    Args:
        entries: the parameters.
        bucket_bytes: of a bucket, at most; a larger parameter has one of its own.
        halves: two buckets where one would do, unless that is too small, so that one
            may travel while backward computes the other.
    """
    total = sum(e.parameter.numel() * e.dtype.itemsize for e in entries)
    enough = bucket_bytes
    if halves and total >= 2 * LEAST_BYTES:
        enough = min(enough, total // 2)
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for entry in reversed(entries):
        kind = (entry.dtype, entry.device)
        bucket = open_buckets.get(kind)
        needed = entry.parameter.numel() * entry.dtype.itemsize
        if bucket is None or bucket.size_bytes + needed > bucket_bytes:
            bucket = Bucket(entry.dtype, device=entry.device)
            open_buckets[kind] = bucket
            buckets.append(bucket)
        bucket.add(whole(entry))
        if bucket.size_bytes >= enough:
            del open_buckets[kind]
    return buckets


def by_owner(
    buckets: Sequence[Bucket], pieces: Mapping[int, Sequence[Piece]]
) -> list[Bucket]:
    """The same buckets cut into pieces, those of one owner beside each other.

    Args:
        buckets: of whole parameters.
        pieces: of each parameter, by its index.
    """
    found = []
    for bucket in buckets:
        cut = [one for w in bucket.pieces for one in pieces[w.entry.index]]
        made = Bucket(bucket.dtype)
        for piece in sorted(cut, key=lambda one: one.owner):
            made.add(piece)
        found.append(made)
    return found
