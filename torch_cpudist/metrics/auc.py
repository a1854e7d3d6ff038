# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The area under the ROC curve, from buckets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.metrics.base import Metric, Words
from torch_cpudist.metrics.buckets import ScoreBuckets, keys_of, keys_of_probabilities
from torch_cpudist.metrics.inputs import Samples

_LEAST_BUCKETS, _MOST_BUCKETS = 16, 1 << 24


class AUC(Metric[float]):
    """The chance that a sample of label 1 scores above one of label 0; ties are half.

    Scores are counted in buckets that keep their order. As long as there are no more
    distinct scores than ``buckets`` the value is exact; then each bucket covers an
    interval of scores, as fine as the number allows, of equal length relative to the
    scores (to the distance from 1 for probabilities above 1/2), and ``error_bound()``
    tells how far off the value can be at most. For scores of a model, with the default,
    that is far below 1e-4 however narrow, tied or skewed they are.

    With one label only, or no sample, the value is nan, not the 0.5 of Fluid: samples
    without clicks say nothing about a model, and 0.5 would be read as one that guesses.

    Unweighted, the value has the same bits however samples are dealt to batches,
    threads and trainers; with weights that are no whole numbers, up to rounding.

    Cost of ``update``: about 0.3 µs per sample, in sorts of as many as there are
    buckets. State: 24 bytes for each occupied bucket, at most 6 MiB; in ``compute_all``
    every trainer receives that of all others. Memory: about four times as much.

    Source: Mann-Whitney statistic; Fawcett, An introduction to ROC analysis (2006).
    """

    def __init__(self, *, buckets: int = 1 << 18, from_logits: bool = False) -> None:
        """Makes the metric.

        Args:
            buckets: most buckets, 16 to 2**24.
            from_logits: predictions are logits, which may be any finite numbers.

        Raises:
            InvalidArgumentError: out of range.
        """
        whole = isinstance(buckets, int) and not isinstance(buckets, bool)
        if not whole or not _LEAST_BUCKETS <= buckets <= _MOST_BUCKETS:
            raise InvalidArgumentError(
                f"AUC: buckets must be a whole number of {_LEAST_BUCKETS} to "
                f"{_MOST_BUCKETS}, got {buckets!r}"
            )
        super().__init__(from_logits=from_logits)
        self.buckets = buckets
        self._clear()

    def _options(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "from_logits": self.from_logits}

    def _prepare(
        self, samples: Samples
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        sums = np.zeros((2, len(samples.scores)))
        weights = 1.0 if samples.weights is None else samples.weights
        sums[1] = samples.clicked * weights
        sums[0] = weights - sums[1]
        if self.from_logits:
            return keys_of(samples.scores), sums
        return keys_of_probabilities(samples.probabilities(False)), sums

    def _add(self, prepared: tuple[NDArray[np.int64], NDArray[np.float64]]) -> None:
        self._found.add(*prepared)

    def _result(self) -> float:
        negatives, positives, pairs = self._counted()
        below = np.cumsum(negatives) - negatives
        if not pairs:
            return math.nan
        return float(np.sum(positives * (below + 0.5 * negatives)) / pairs)

    def error_bound(self) -> float:
        """How far ``compute()`` can be from the exact value at most; nan without one.

        Half of all pairs of both labels that share a bucket that covers an interval.
        """
        with self._lock:
            negatives, positives, pairs = self._counted()
            if not pairs:
                return math.nan
            if not self._found.shift:
                return 0.0
            return float(0.5 * np.sum(positives * negatives) / pairs)

    def _counted(
        self,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Weights of both labels by bucket, and of all pairs."""
        self._found.settle()
        negatives, positives = self._found.sums
        return negatives, positives, float(negatives.sum() * positives.sum())

    def _clear(self) -> None:
        self._found = ScoreBuckets(self.buckets)

    def _pack(self) -> Words:
        return self._found.pack()

    def _merge(self, words: Words) -> None:
        self._found.merge_packed(words)
