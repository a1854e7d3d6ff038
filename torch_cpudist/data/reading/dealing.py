# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Dealing parts of files to trainers, processes of a loader and reader threads.

Everybody computes the whole deal from the list of files and their sizes and takes its
own share: no message is sent, nothing is lost or dealt twice as long as all see the
same files.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

STREAM_END = 2**64 - 1  # the end of a part that is read to wherever the file ends
_LARGEST_BYTES = 8 << 20
_SMALLEST_BYTES = 64 << 10
_PARTS_PER_SHARE = 32
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Part:
    """What one reader thread reads at a stretch: the lines that start in a range."""

    file: int  # its place in the list of files
    begin: int
    end: int
    size_bytes: int


def _mixed(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def mixed_seed(*numbers: int) -> int:
    """One number of 64 bits out of several, in which every bit depends on all."""
    seed = 0
    for number in numbers:
        seed = _mixed(seed + 0x9E3779B97F4A7C15 + _mixed(number + 1))
    return seed


def cut(sizes_bytes: Sequence[int], shares: int, whole: bool) -> list[Part]:
    """Cuts files into parts.

    Args:
        sizes_bytes: of every file.
        shares: how many share the parts: trainers by processes. Not threads, of which
            trainers may have unlike numbers.
        whole: files cannot be read from the middle; a part is a file.
    """
    if whole:
        return [Part(i, 0, STREAM_END, size) for i, size in enumerate(sizes_bytes)]
    wanted = sum(sizes_bytes) // (shares * _PARTS_PER_SHARE)
    length = min(max(wanted, _SMALLEST_BYTES), _LARGEST_BYTES)
    parts = []
    for file, size in enumerate(sizes_bytes):
        count = max(1, -(-size // length))
        bounds = [size * i // count for i in range(count)]
        # Up to the size that was found: what is cut off meanwhile is missed, what is
        # appended is not read. Files that tell no size are read to their end.
        bounds.append(size or STREAM_END)
        parts += [
            Part(file, begin, end, min(end, size) - begin)
            for begin, end in itertools.pairwise(bounds)
        ]
    return parts


def deal(
    parts: Sequence[Part], readers: int, seed: int | None = None
) -> list[list[Part]]:
    """Deals parts to readers, the next part to whoever has the fewest bytes.

    Args:
        parts: all parts there are.
        readers: into how many shares.
        seed: deals them in another order, the same for equal seeds. Default: in theirs.

    Returns:
        The parts of each reader, in the order in which they are to be read.
    """
    order = list(range(len(parts)))
    if seed is not None:
        order.sort(key=lambda number: mixed_seed(seed, number))
    shares: list[list[Part]] = [[] for _ in range(readers)]
    heap = [(0, reader) for reader in range(readers)]
    for number in order:
        part = parts[number]
        load, reader = heapq.heappop(heap)
        shares[reader].append(part)
        heapq.heappush(heap, (load + max(part.size_bytes, 1), reader))
    return shares
