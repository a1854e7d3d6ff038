# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples kept by group, of as many groups as a fixed number of them allows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.metrics.buckets import keys_of

Array = NDArray[np.float64]
Hashes = NDArray[np.uint64]
_LEAST_WAITING = 1 << 16
_LEVELS = 64


class Rows(NamedTuple):
    """Distinct samples ``[n]`` and how much each of them counts.

    Attributes:
        groups: hashes of their groups, which differ where groups do.
        scores: keys in the order of the scores.
        labels: as they were given.
        weights: sums over the samples that are equal in the three above.
    """

    groups: Hashes
    scores: NDArray[np.int64]
    labels: Array
    weights: Array

    def taken(self, chosen: NDArray[Any]) -> Rows:
        """Those of a mask, or at these places and in their order."""
        return Rows(
            self.groups[chosen],
            self.scores[chosen],
            self.labels[chosen],
            self.weights[chosen],
        )

    def united(self) -> Rows:
        """In the order of groups, scores and labels; what is equal only once."""
        order = np.lexsort((self.labels, self.scores, self.groups))
        if not len(order):
            return self
        rows = self.taken(order)
        changes = (
            (rows.groups[1:] != rows.groups[:-1])
            | (rows.scores[1:] != rows.scores[:-1])
            | (rows.labels[1:] != rows.labels[:-1])
        )
        begins = np.flatnonzero(np.concatenate([[True], changes]))
        sums = np.add.reduceat(rows.weights, begins)
        return rows.taken(begins)._replace(weights=sums)


def _joined(parts: list[Rows]) -> Rows:
    return Rows(
        np.concatenate([part.groups for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )


def _no_rows() -> Rows:
    none = np.empty(0)
    return Rows(np.empty(0, np.uint64), np.empty(0, np.int64), none, none)


def hashes_of(groups: NDArray[np.int64]) -> Hashes:
    """Numbers that look drawn at random, another one for each group.

    Source: the finaliser of SplitMix64, which maps the 64-bit numbers one to one;
    Steele, Lea, Flood, Fast splittable pseudorandom number generators (OOPSLA 2014).
    """
    found = groups.astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


class GroupedSamples:
    """Distinct samples of whole groups. Not thread-safe.

    All groups are kept until there are more than ``capacity`` distinct samples; then
    those alone whose hash begins with a zero bit, with two, and so on, until they fit.
    So ``level`` is the least one with which all samples so far fit, and what is kept is
    the same for any order of them, and any split. Whole weights add up exactly below
    2**53.

    Attributes:
        capacity: most distinct samples.
        level: of 2**level groups one is kept.
        rows: what is kept, in the order of groups, scores and labels.
    """

    def __init__(self, capacity: int) -> None:
        """Without samples."""
        self.capacity = capacity
        self.level = 0
        self.rows = _no_rows()
        self._waiting: list[Rows] = []
        self._count = 0

    def add(
        self, groups: NDArray[np.int64], scores: Array, labels: Array, weights: Array
    ) -> None:
        """Adds samples ``[n]``."""
        # Of -0.0 and 0.0, which are equal, one is left.
        given = Rows(hashes_of(groups), keys_of(scores), labels + 0.0, weights.copy())
        self._take(given)
        if self._count >= max(self.capacity // 4, _LEAST_WAITING):
            self.settle()

    def _take(self, rows: Rows) -> None:
        if self.level:
            rows = rows.taken(_kept(rows.groups, self.level))
        self._waiting.append(rows)
        self._count += len(rows.groups)

    def settle(self) -> None:
        """Sorts what has come into what is kept."""
        if self._waiting:
            self.rows = _joined([self.rows, *self._waiting]).united()
            self._waiting, self._count = [], 0
        # Rows are in the order of hashes: what a level keeps are the first ones.
        while len(self.rows.groups) > self.capacity and self.level < _LEVELS:
            self.level += 1
            self.rows = self.rows.taken(_kept(self.rows.groups, self.level))

    def pack(self) -> NDArray[np.int64]:
        """Level, then groups, scores, labels and weights: 1 + 4 words for each row."""
        self.settle()
        columns = [column.view(np.int64) for column in self.rows]
        return np.concatenate([np.array([self.level]), *columns])

    def merge_packed(self, words: NDArray[np.int64]) -> None:
        """Adds what ``pack`` returned.

        Raises:
            InvalidArgumentError: it is something else.
        """
        count, rest = divmod(len(words) - 1, 4)
        good = not rest and 0 <= words[0] <= _LEVELS
        if good:
            groups, scores, labels, weights = words[1:].copy().reshape(4, count)
            rows = Rows(
                groups.view(np.uint64),
                scores,
                labels.view(np.float64),
                weights.view(np.float64),
            )
            good = (
                bool((rows.groups[1:] >= rows.groups[:-1]).all())
                and bool(_kept(rows.groups, int(words[0])).all())
                and bool(np.isfinite(rows.labels).all())
                and bool((np.isfinite(rows.weights) & (rows.weights >= 0)).all())
            )
        if not good:
            raise InvalidArgumentError(
                "metric: this is not the state of grouped samples: expected a level, "
                "ascending groups, scores, labels and weights; found "
                f"{len(words)} words."
            )
        self.settle()
        if words[0] > self.level:
            self.level = int(words[0])
            self.rows = self.rows.taken(_kept(self.rows.groups, self.level))
        self._take(rows)
        self.settle()


def _kept(groups: Hashes, level: int) -> NDArray[np.bool_]:
    """Which hashes begin with so many zero bits."""
    if level >= _LEVELS:
        return np.asarray(groups == 0)
    if not level:
        return np.ones(len(groups), np.bool_)
    return np.asarray(groups >> np.uint64(_LEVELS - level) == 0)
