# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Metrics that are a ratio of two sums: log loss, errors, accuracy."""

from __future__ import annotations

import abc
import math
from typing import Any

import numpy as np

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.metrics import exact
from torch_cpudist.metrics.base import Metric, Words, check_words
from torch_cpudist.metrics.inputs import Array, Samples

# Numbers that wait to be summed together, which is cheaper than batch by batch.
_MOST_WAITING = 1 << 16


class SumMetric(Metric[float]):
    """A weighted mean of a term of each sample; both sums are exact.

    The value has the same bits however the samples are dealt to batches, threads and
    trainers. Cost of ``update``: a few passes over the batch. State: 576 bytes; up to
    1 MiB of terms wait to be summed.
    """

    def __init__(self, *, from_logits: bool = False) -> None:
        """See ``Metric``."""
        super().__init__(from_logits=from_logits)
        self._clear()

    @abc.abstractmethod
    def _terms(self, samples: Samples) -> Array:
        """One number for each sample."""

    def _prepare(self, samples: Samples) -> tuple[Array, Array | None]:
        weights = samples.weights
        with np.errstate(over="ignore"):  # which is told by the error below
            terms = self._terms(samples)
            if weights is not None:
                terms, weights = terms * weights, weights.copy()
        if not np.isfinite(terms).all():
            raise InvalidArgumentError(
                f"{self!r}: the term of a sample is beyond float64."
            )
        return terms, weights

    def _add(self, prepared: tuple[Array, Array | None]) -> None:
        terms, weights = prepared
        self._terms_waiting.append(terms)
        self._waiting += len(terms)
        if weights is None:
            self._weight.add_count(len(terms))
        else:
            self._weights_waiting.append(weights)
        if self._waiting >= _MOST_WAITING:
            self._settle()

    def _settle(self) -> None:
        if self._terms_waiting:
            self._total.add(np.concatenate(self._terms_waiting))
        if self._weights_waiting:
            self._weight.add(np.concatenate(self._weights_waiting))
        self._drop_waiting()

    def _result(self) -> float:
        self._settle()
        return self._total.over(self._weight)

    def _clear(self) -> None:
        self._total, self._weight = exact.ExactSum(), exact.ExactSum()
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        self._terms_waiting: list[Array] = []
        self._weights_waiting: list[Array] = []
        self._waiting = 0

    def _pack(self) -> Words:
        self._settle()
        return np.concatenate([self._total.pack(), self._weight.pack()])

    def _merge(self, words: Words) -> None:
        check_words(self, words, 2 * exact.WORDS)
        self._total.merge(words[: exact.WORDS])
        self._weight.merge(words[exact.WORDS :])


class LogLoss(SumMetric):
    """The mean of -(y ln p + (1 - y) ln(1 - p)), in nats. Labels in 0 to 1.

    From logits z it is max(z, 0) - z y + ln(1 + exp(-abs(z))), exact for any z.
    Probabilities are clipped to ε and 1 - ε, ε of float32 (of float64 for float64), as
    scikit-learn does. Else as ``SumMetric``.
    """

    def _terms(self, samples: Samples) -> Array:
        y = samples.soft_labels
        if self.from_logits:
            z = samples.scores
            rest = np.log1p(np.exp(-np.abs(z)))
            return np.asarray(np.maximum(z, 0.0) - z * y + rest)
        p = np.clip(samples.probabilities(False), samples.eps, 1 - samples.eps)
        return np.asarray(-(y * np.log(p) + (1 - y) * np.log1p(-p)))


class MAE(SumMetric):
    """The mean of abs(prediction - label), of any finite numbers."""

    def _terms(self, samples: Samples) -> Array:
        found = samples.predictions(self.from_logits) - samples.labels
        return np.asarray(np.abs(found))


class MSE(SumMetric):
    """The mean of (prediction - label)², of any finite numbers."""

    def _terms(self, samples: Samples) -> Array:
        found = samples.predictions(self.from_logits) - samples.labels
        return np.asarray(np.square(found))


class RMSE(MSE):
    """The square root of ``MSE``."""

    def _result(self) -> float:
        return math.sqrt(super()._result())


class Accuracy(SumMetric):
    """The share of samples that are predicted right.

    With a threshold, of probabilities (or logits) and labels 0 or 1: a probability of
    at least the threshold predicts 1. Without one, of chosen classes:
    ``Accuracy(threshold=None).update(logits.argmax(1), labels)``.
    """

    def __init__(
        self, *, threshold: float | None = 0.5, from_logits: bool = False
    ) -> None:
        """Makes the metric.

        Args:
            threshold: in 0 to 1; ``None`` compares predictions with labels.
            from_logits: see ``Metric``; needs a threshold.

        Raises:
            InvalidArgumentError: out of range.
        """
        if threshold is None and from_logits:
            raise InvalidArgumentError(
                "Accuracy: from_logits=True needs a threshold; classes are compared "
                "as they are."
            )
        if threshold is not None and not 0 <= threshold <= 1:
            raise InvalidArgumentError(
                f"Accuracy: threshold must be 0 to 1 or None, got {threshold!r}"
            )
        super().__init__(from_logits=from_logits)
        self.threshold = threshold

    def _options(self) -> dict[str, Any]:
        return {"threshold": self.threshold, "from_logits": self.from_logits}

    def _terms(self, samples: Samples) -> Array:
        if self.threshold is None:
            right = samples.scores == samples.labels
        else:
            predicted = samples.probabilities(self.from_logits) >= self.threshold
            right = predicted == samples.clicked
        return np.asarray(right, np.float64)
