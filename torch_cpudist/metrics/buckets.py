# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Buckets that keep the order of scores, as fine as a fixed number of them allows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_cpudist.errors import InvalidArgumentError

Keys = NDArray[np.int64]
Sums = NDArray[np.float64]
_LEAST_WAITING = 1 << 16
_SIGN_OFF = np.int64((1 << 63) - 1)


def keys_of(scores: NDArray[np.float64]) -> Keys:
    """Whole numbers in the order of the scores, by their bits; -0.0 is 0.0.

    Bits of floats, taken as a sign and a number, are in their order already; those of
    negative ones are turned round.
    """
    bits = (scores + 0.0).view(np.int64)
    return bits ^ ((bits >> np.int64(63)) & _SIGN_OFF)


def keys_of_probabilities(scores: NDArray[np.float64]) -> Keys:
    """As ``keys_of``, as fine towards 1 as towards 0: by the distance from there.

    The distance is exact for what is above 1/2.
    """
    half = keys_of(np.array([0.5]))
    return np.where(scores <= 0.5, keys_of(scores), 2 * half - keys_of(1.0 - scores))


class ScoreBuckets:
    """Weights of negatives and positives by score. Not thread-safe.

    A bucket is a score's key without its last ``shift`` bits. All bits count until more
    than ``capacity`` buckets are occupied; then one bit fewer, until they fit. So the
    shift is the least one with which all samples so far fit: the same for any order of
    them, and any split. Whole weights add up exactly below 2**53.

    Attributes:
        capacity: most buckets.
        shift: bits that do not count.
        keys: of occupied buckets, ascending.
        sums: ``[2, len(keys)]``: weights of labels 0 and 1.
    """

    def __init__(self, capacity: int) -> None:
        """Without samples."""
        self.capacity = capacity
        self.shift = 0
        self.keys: Keys = np.empty(0, np.int64)
        self.sums: Sums = np.empty((2, 0))
        self._waiting: list[tuple[Keys, Sums]] = []
        self._count = 0

    def add(self, keys: Keys, sums: Sums) -> None:
        """Adds samples: all bits of their keys ``[n]``, and weights ``[2, n]``."""
        self._waiting.append((keys >> np.int64(self.shift), sums))
        self._count += len(keys)
        if self._count >= max(self.capacity, _LEAST_WAITING):
            self.settle()

    def settle(self) -> None:
        """Sorts what has come into buckets."""
        if not self._waiting:
            return
        keys = np.concatenate([part[0] for part in self._waiting])
        sums = np.concatenate([part[1] for part in self._waiting], axis=1)
        self._waiting, self._count = [], 0
        keys, sums = _united(keys, sums, np.argsort(keys))
        if len(self.keys):
            keys = np.concatenate([self.keys, keys])
            sums = np.concatenate([self.sums, sums], axis=1)
            # Of two sorted runs, which this kind of sort merges.
            keys, sums = _united(keys, sums, np.argsort(keys, kind="stable"))
        self.keys, self.sums = keys, sums
        self._fit()

    def _fit(self) -> None:
        """Drops as many bits as it takes."""
        if len(self.keys) <= self.capacity:
            return
        # Neighbours fall into one bucket when all bits that tell them apart are gone.
        apart = (self.keys[1:] ^ self.keys[:-1]).view(np.uint64)
        lengths = np.bincount(_bit_lengths(apart), minlength=65)
        buckets = 1 + len(apart) - np.cumsum(lengths)
        self._coarsen(int(np.argmax(buckets <= self.capacity)))

    def _coarsen(self, bits: int) -> None:
        if bits:
            self.shift += bits
            keys = _cut(self.keys, bits)
            order = np.arange(len(keys))
            self.keys, self.sums = _united(keys, self.sums, order)

    def merge(self, shift: int, keys: Keys, sums: Sums) -> None:
        """Adds other buckets, of a shift of their own."""
        self.settle()
        self._coarsen(max(shift - self.shift, 0))
        self._waiting.append((_cut(keys, self.shift - shift), sums))
        self.settle()

    def pack(self) -> NDArray[np.int64]:
        """Shift, then keys and weights: 1 + 3 words for each bucket."""
        self.settle()
        sums = self.sums.reshape(-1).view(np.int64)
        return np.concatenate([np.array([self.shift]), self.keys, sums])

    def merge_packed(self, words: NDArray[np.int64]) -> None:
        """Adds what ``pack`` returned.

        Raises:
            InvalidArgumentError: it is something else.
        """
        count, rest = divmod(len(words) - 1, 3)
        keys = words[1 : count + 1]
        sums = words[count + 1 :].copy().view(np.float64)
        good = not rest and 0 <= words[0] < 64 and bool((keys[1:] > keys[:-1]).all())
        if not good or not bool((np.isfinite(sums) & (sums >= 0)).all()):
            raise InvalidArgumentError(
                "AUC: this is not the state of buckets: expected a shift, ascending "
                f"keys and weights of both labels; found {len(words)} words."
            )
        self.merge(int(words[0]), keys, sums.reshape(2, count))


def _united(keys: Keys, sums: Sums, order: NDArray[np.intp]) -> tuple[Keys, Sums]:
    """Every key once, and what belongs to it together, in an order that sorts them."""
    if not len(keys):
        return keys, sums
    keys = keys[order]
    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[begins], np.add.reduceat(sums[:, order], begins, axis=1)


def _cut(keys: Keys, bits: int) -> Keys:
    # A shift by all 64 bits is not defined; by 63 only the sign is left.
    return keys >> np.int64(min(bits, 63))


def _bit_lengths(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many bits each number takes."""
    high = values >> np.uint64(32)
    low = values & np.uint64(0xFFFFFFFF)
    half = np.where(high > 0, high, low).astype(np.float64)
    return np.frexp(half)[1].astype(np.int64) + 32 * (high > 0)
