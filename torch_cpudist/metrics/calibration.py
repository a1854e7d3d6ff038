# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether predicted rates are the ones that are seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_cpudist.metrics import exact
from torch_cpudist.metrics.base import Metric, Words, check_words
from torch_cpudist.metrics.inputs import Array, Samples

_BUCKETS = 4096
_MOST_WAITING = 1 << 16
# A group of buckets counts when its predicted rate is known to so much, and spans so
# much at most: those of Fluid.
_ERROR_BOUND, _MOST_SPAN = 0.05, 0.01


@dataclass(frozen=True)
class CalibrationReport:
    """What ``Calibration`` finds; nan where nothing can be said.

    Attributes:
        calibration: predicted / actual; above 1 the model promises too much.
        copc: actual / predicted, "click over predicted click".
        predicted_ctr: mean prediction, the ancestor's mean q.
        actual_ctr: mean label.
        bucket_error: mean of abs(actual / predicted - 1) over groups of samples that
            are predicted alike, weighed by samples; nan if no group is large enough.
        samples: sum of weights.
    """

    calibration: float
    copc: float
    predicted_ctr: float
    actual_ctr: float
    bucket_error: float
    samples: float


class Calibration(Metric[CalibrationReport]):
    """Predicted over actual rate, as a ``CalibrationReport``. Labels in 0 to 1.

    All but ``bucket_error`` are ratios of exact sums, with the same bits for any split;
    it may differ in rounding. It goes through 4096 buckets of equal width from low
    predictions to high and joins neighbours within a span of 0.01, until the relative
    error of their rate, √((1 - q) / (q n)), is below 0.05; groups that never get there
    do not count.

    Cost of ``update``: a few passes over the batch. State: 97 KiB.

    Source: ``FleetUtil.get_global_metrics`` of PaddlePaddle Fluid 1.7, with the mean
    prediction of a bucket in the place of its lower bound.
    """

    def __init__(self, *, from_logits: bool = False) -> None:
        """See ``Metric``."""
        super().__init__(from_logits=from_logits)
        self._clear()

    def _prepare(self, samples: Samples) -> Array:
        predicted = samples.probabilities(self.from_logits)
        weights = samples.weights
        weights = np.ones_like(predicted) if weights is None else weights
        labels = samples.soft_labels
        return np.stack([predicted, weights, labels * weights, predicted * weights])

    def _add(self, prepared: Array) -> None:
        self._waiting.append(prepared)
        self._count += prepared.shape[1]
        if self._count >= _MOST_WAITING:
            self._settle()

    def _settle(self) -> None:
        if not self._waiting:
            return
        predicted, *columns = np.concatenate(self._waiting, axis=1)
        self._drop_waiting()
        place = np.minimum((predicted * _BUCKETS).astype(np.int64), _BUCKETS - 1)
        for i, column in enumerate(columns):
            self._totals[i].add(column)
            self._sums[i] += np.bincount(place, weights=column, minlength=_BUCKETS)

    def _result(self) -> CalibrationReport:
        self._settle()
        shown, clicked, predicted = self._totals
        return CalibrationReport(
            calibration=predicted.over(clicked),
            copc=clicked.over(predicted),
            predicted_ctr=predicted.over(shown),
            actual_ctr=clicked.over(shown),
            bucket_error=_bucket_error(*self._sums),
            samples=float(shown),
        )

    def _clear(self) -> None:
        self._totals = [exact.ExactSum() for _ in range(3)]
        self._sums = np.zeros((3, _BUCKETS))
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        self._waiting: list[Array] = []
        self._count = 0

    def _pack(self) -> Words:
        self._settle()
        totals = [total.pack() for total in self._totals]
        return np.concatenate([*totals, self._sums.reshape(-1).view(np.int64)])

    def _merge(self, words: Words) -> None:
        self._settle()
        head = 3 * exact.WORDS
        check_words(self, words, head + 3 * _BUCKETS)
        for i, total in enumerate(self._totals):
            total.merge(words[i * exact.WORDS : (i + 1) * exact.WORDS])
        self._sums += words[head:].copy().view(np.float64).reshape(3, _BUCKETS)


def _bucket_error(
    shown: NDArray[np.float64],
    clicked: NDArray[np.float64],
    predicted: NDArray[np.float64],
) -> float:
    """See ``Calibration``."""
    begin: float | None = None
    shows = clicks = promised = total = weight = 0.0
    for i in np.flatnonzero(shown).tolist():
        lower = i / _BUCKETS
        if begin is None or lower - begin > _MOST_SPAN:
            begin, shows, clicks, promised = lower, 0.0, 0.0, 0.0
        shows += float(shown[i])
        clicks += float(clicked[i])
        promised += float(predicted[i])
        rate = promised / shows
        if rate > 0 and math.sqrt(max(1 - rate, 0) / (rate * shows)) < _ERROR_BOUND:
            total += abs(clicks / promised - 1) * shows
            weight += shows
            begin = None
    return total / weight if weight else math.nan
