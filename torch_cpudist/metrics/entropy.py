# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Log loss relative to that of a model that knows the mean rate alone."""

from __future__ import annotations

import math

import numpy as np

from torch_cpudist.metrics import exact
from torch_cpudist.metrics.base import Metric, Words, check_words
from torch_cpudist.metrics.inputs import Array, Samples
from torch_cpudist.metrics.means import LogLoss, SumMetric

_WORDS = 2 * exact.WORDS


class _Rate(SumMetric):
    """The mean label."""

    def _terms(self, samples: Samples) -> Array:
        return samples.soft_labels


class NormalizedEntropy(Metric[float]):
    """``LogLoss`` / the entropy of the mean label, both in nats. Labels in 0 to 1.

    NE = -mean(y ln q + (1 - y) ln(1 - q)) / -(p ln p + (1 - p) ln(1 - p)), q what is
    predicted and p the mean label of the same samples: 1 for a model that always
    predicts p, below 1 for a better one, whatever the rate. nan without samples and
    where all labels are 0, or all 1.

    Sums are exact, so that the value has the same bits for any split; ``from_logits``
    and clipping as ``LogLoss``. State: 1152 bytes.

    Source: He et al., Practical lessons from predicting clicks on ads at Facebook
    (ADKDD 2014), section 2, equation 1.
    """

    def __init__(self, *, from_logits: bool = False) -> None:
        """See ``Metric``."""
        super().__init__(from_logits=from_logits)
        self._clear()

    def _prepare(
        self, samples: Samples
    ) -> tuple[tuple[Array, Array | None], tuple[Array, Array | None]]:
        return self._loss._prepare(samples), self._rate._prepare(samples)

    def _add(
        self,
        prepared: tuple[tuple[Array, Array | None], tuple[Array, Array | None]],
    ) -> None:
        loss, rate = prepared
        self._loss._add(loss)
        self._rate._add(rate)

    def _result(self) -> float:
        loss, rate = self._loss.compute(), self._rate.compute()
        if not 0 < rate < 1:  # nan as well
            return math.nan
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
        return loss / entropy

    def _clear(self) -> None:
        self._loss, self._rate = LogLoss(from_logits=self.from_logits), _Rate()

    def _pack(self) -> Words:
        return np.concatenate([self._loss.packed(), self._rate.packed()])

    def _merge(self, words: Words) -> None:
        check_words(self, words, 2 * _WORDS)
        self._loss.merge_packed(words[:_WORDS])
        self._rate.merge_packed(words[_WORDS:])
