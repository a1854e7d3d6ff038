# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which part of an input the ids of a lookup are: seen once, found again in others.

A part is a box: a range in each dimension. Ids that are a view of the input say by
their strides which; of ids that are a copy or a cast it is the one with their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# A range as in a Python slice: counted from the begin, or from the end if negative.
Range = tuple[int, int | None]
# Parts with the same values, of which later batches tell the right one.
_MOST_CANDIDATES = 64
# That tell most columns apart.
_FIRST_ROWS = 8


@dataclass(frozen=True)
class Part:
    """A part of one input, as far as it is known.

    Attributes:
        leaf: index of the input.
        ranges: by dimension, the ranges that fit all that was seen, the likeliest
            first.
    """

    leaf: int
    ranges: tuple[tuple[Range, ...], ...]


def meet(first: Part, second: Part) -> Part | None:
    """What fits both; ``None`` if nothing does."""
    if first.leaf != second.leaf or len(first.ranges) != len(second.ranges):
        return None
    common = []
    for one, other in zip(first.ranges, second.ranges, strict=True):
        both = tuple(found for found in one if found in other)
        if not both:
            return None
        common.append(both)
    return Part(first.leaf, tuple(common))


def meet_all(first: Sequence[Part], second: Sequence[Part]) -> list[Part]:
    """The parts that fit one of each."""
    pairs = itertools.product(first, second)
    found = [part for pair in pairs if (part := meet(*pair)) is not None]
    return found[:_MOST_CANDIDATES]


def _ranges(begin: int, end: int, size: int) -> tuple[Range, ...]:
    """The slices that name elements ``begin`` to ``end`` of ``size``."""
    last = end - size or None
    ends = (None, end) if end == size else (end, last)
    return tuple((start, stop) for start in (begin, begin - size) for stop in ends)


def _box(leaf: int, tensor: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> Part:
    sizes = tensor.shape
    return Part(
        leaf,
        tuple(_ranges(*bound, size) for bound, size in zip(bounds, sizes, strict=True)),
    )


def find(ids: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[Part]:
    """The parts of ``inputs`` that hold the ids of a lookup, by memory or by value.

    Costs a pass over the inputs where the ids are no view of any. Reads values only.
    """
    if ids.numel() == 0:
        return []
    memory = ids.untyped_storage().data_ptr()
    for leaf, tensor in enumerate(inputs):
        if tensor.dtype != ids.dtype or tensor.numel() == 0:
            continue
        if tensor.untyped_storage().data_ptr() != memory:
            continue
        bounds = _viewed(ids, tensor)
        if bounds is not None:
            return [_box(leaf, tensor, bounds)]
    found: list[Part] = []
    flat = ids.reshape(-1)
    for leaf, tensor in enumerate(inputs):
        found += [_box(leaf, tensor, bounds) for bounds in _equal(flat, tensor)]
        if len(found) >= _MOST_CANDIDATES:
            break
    return found[:_MOST_CANDIDATES]


def _place(offset: int, tensor: torch.Tensor) -> list[int] | None:
    """The indices of the element at an offset from the first one."""
    indices = [0] * tensor.dim()
    strides = tensor.stride()
    for dim in sorted(range(tensor.dim()), key=lambda d: -strides[d]):
        if tensor.shape[dim] == 1 or strides[dim] == 0:
            continue
        indices[dim], offset = divmod(offset, strides[dim])
        if indices[dim] >= tensor.shape[dim]:
            return None
    return None if offset else indices


def _viewed(ids: torch.Tensor, tensor: torch.Tensor) -> list[tuple[int, int]] | None:
    """The box that a view of ``tensor`` has all elements of."""
    begin = int(ids.storage_offset() - tensor.storage_offset())
    if begin < 0:
        return None
    steps = [
        (size - 1) * stride
        for size, stride in zip(ids.shape, ids.stride(), strict=True)
        if stride
    ]
    first, last = _place(begin, tensor), _place(begin + sum(steps), tensor)
    if first is None or last is None:
        return None
    bounds = [(low, high + 1) for low, high in zip(first, last, strict=True)]
    elements = 1
    for low, high in bounds:
        elements *= max(high - low, 0)
    seen = 1
    for size, stride in zip(ids.shape, ids.stride(), strict=True):
        seen *= size if stride else 1
    return bounds if elements == seen else None


def _equal(flat: torch.Tensor, tensor: torch.Tensor) -> list[list[tuple[int, int]]]:
    """The boxes of ``tensor`` whose elements, cast to int64, are ``flat`` in order."""
    count = flat.numel()
    whole = [(0, size) for size in tensor.shape]
    if tensor.numel() == count:
        return [whole] if torch.equal(tensor.reshape(-1).long(), flat.long()) else []
    if tensor.dim() != 2 or not tensor.shape[0] or count % tensor.shape[0]:
        return []
    rows, width = tensor.shape[0], count // tensor.shape[0]
    if width > tensor.shape[1]:
        return []
    wanted = flat.long().reshape(rows, width)
    first = (tensor[:_FIRST_ROWS].long() == wanted[:_FIRST_ROWS, :1]).all(0)
    begins = first[: tensor.shape[1] - width + 1].nonzero().flatten().tolist()
    return [
        [(0, rows), (begin, begin + width)]
        for begin in begins
        if torch.equal(tensor[:, begin : begin + width].long(), wanted)
    ]
