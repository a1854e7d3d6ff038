# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Metrics of the order within groups of samples: users, sessions, queries."""

from __future__ import annotations

import abc
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.log import logger
from torch_cpudist.metrics import exact
from torch_cpudist.metrics.base import Metric, Words
from torch_cpudist.metrics.grouped_samples import GroupedSamples, Rows
from torch_cpudist.metrics.inputs import Array, Samples

_LEAST_SAMPLES, _MOST_SAMPLES = 16, 1 << 28
Starts = NDArray[np.intp]


class GroupValues(NamedTuple):
    """Of each group that has a value ``[n]``: it, and how much it counts."""

    values: Array
    weights: Array


class GroupedMetric(Metric[float]):
    """A weighted mean of a value of each group of samples.

    ``update(scores, labels, groups=users)``: a group is a whole number, the same one
    wherever its samples come up, in any batch and on any trainer; ``hash_keys`` makes
    numbers of texts. Scores are any finite numbers, and only their order counts.

    Samples are kept, as a group's value needs all of them: exact as long as there are
    no more than ``samples`` distinct ones (of group, score and label). Beyond, whole
    groups go, chosen by a hash of theirs, half of those that are left at a time, which
    is logged; ``kept_share()`` is the share of groups that are left, and
    ``standard_error()`` how far the value is from that of all groups, by chance. A
    group of more samples than that cannot be kept.

    Values have the same bits however samples are dealt to batches, threads and
    trainers; of GAUC with weights that are no whole numbers up to rounding.

    Cost of ``update``: about 0.6 µs per sample, in sorts. State: 32 bytes for each
    distinct sample, 32 MiB at most by default; in ``compute_all`` every trainer
    receives that of all others. Memory: about four times as much.
    """

    grouped = True

    def __init__(self, *, samples: int = 1 << 20) -> None:
        """Makes the metric.

        Args:
            samples: most distinct samples that are kept, 16 to 2**28.

        Raises:
            InvalidArgumentError: out of range.
        """
        _check_whole(self, "samples", samples, _LEAST_SAMPLES, _MOST_SAMPLES)
        super().__init__()
        self.samples = samples
        self._told = False
        self._clear()

    def _options(self) -> dict[str, Any]:
        return {"samples": self.samples}

    @abc.abstractmethod
    def _labels(self, samples: Samples) -> Array:
        """Labels, if they are what this metric takes."""

    @abc.abstractmethod
    def _values(self, rows: Rows, starts: Starts) -> GroupValues:
        """Values of all groups that have one; where in the rows each group starts."""

    def _weights(self, samples: Samples) -> Array:
        if samples.weights is not None:
            raise InvalidArgumentError(
                f"{self!r} has no weights: a place in an order is taken or not. Update "
                "it by itself, without weights."
            )
        return np.ones_like(samples.scores)

    def _prepare(self, samples: Samples) -> tuple[Any, ...]:
        labels, weights = self._labels(samples), self._weights(samples)
        counted = weights > 0
        columns = (samples.needed_groups, samples.scores, labels, weights)
        return tuple(column[counted] for column in columns)

    def _add(self, prepared: tuple[Any, ...]) -> None:
        self._found.add(*prepared)
        self._tell()

    def _tell(self) -> None:
        """Says that groups go, once."""
        if self._found.level and not self._told:
            self._told = True
            logger.warning(
                "%r: more distinct samples than it may keep: from now on its value is "
                "that of a share of the groups, chosen by hash (kept_share(), "
                "standard_error()). samples= keeps more.",
                self,
            )

    def _grouped(self) -> GroupValues:
        self._found.settle()
        self._tell()
        rows = self._found.rows
        if not len(rows.groups):
            return GroupValues(np.empty(0), np.empty(0))
        changes = rows.groups[1:] != rows.groups[:-1]
        starts = np.flatnonzero(np.concatenate([[True], changes]))
        return self._values(rows, starts)

    def _result(self) -> float:
        values, weights = self._grouped()
        return _mean(values, weights)

    def kept_share(self) -> float:
        """The share of groups that the value is of, 2**-n; 1 as long as it is exact."""
        with self._lock:
            self._found.settle()
            return 2.0**-self._found.level

    def standard_error(self) -> float:
        """Of ``compute()``, as that of a sample of the groups; 0 while it is exact.

        Source: the ratio estimator of Cochran, Sampling techniques (1977), section
        2.11. nan with fewer than two groups that have a value.
        """
        with self._lock:
            values, weights = self._grouped()
            share = 2.0**-self._found.level
        if share == 1.0:
            return 0.0
        if len(values) < 2:
            return math.nan
        off = weights * (values - _mean(values, weights))
        correction = (1 - share) * len(values) / (len(values) - 1)
        return math.sqrt(correction * float(off @ off)) / float(weights.sum())

    def _clear(self) -> None:
        self._found = GroupedSamples(self.samples)
        self._told = False

    def _pack(self) -> Words:
        return self._found.pack()

    def _merge(self, words: Words) -> None:
        self._found.merge_packed(words)
        self._tell()


class GAUC(GroupedMetric):
    """The mean of every group's AUC, weighed by its samples. Labels 0 or 1.

    GAUC = Σ n(u) AUC(u) / Σ n(u), over the groups u that have samples of both labels;
    n(u) is the number of their samples, or the sum of their weights. Groups of one
    label have no order that could be right and do not count. nan where none counts.
    Else as ``GroupedMetric``.

    Source: Zhou et al., Deep interest network for click-through rate prediction (KDD
    2018), section 6.3, after Zhu et al., Optimized cost per click in Taobao display
    advertising (KDD 2017).
    """

    def _labels(self, samples: Samples) -> Array:
        return samples.clicked.astype(np.float64)

    def _weights(self, samples: Samples) -> Array:
        weights = samples.weights
        return np.ones_like(samples.scores) if weights is None else weights

    def _values(self, rows: Rows, starts: Starts) -> GroupValues:
        positives = rows.weights * rows.labels
        negatives = rows.weights - positives
        ties = _ties(rows)
        positives = np.add.reduceat(positives, ties)
        negatives = np.add.reduceat(negatives, ties)
        starts = np.searchsorted(ties, starts)
        below = _before(negatives, starts)
        won = np.add.reduceat(positives * (below + 0.5 * negatives), starts)
        clicks = np.add.reduceat(positives, starts)
        others = np.add.reduceat(negatives, starts)
        both = (clicks > 0) & (others > 0)
        won, clicks, others = won[both], clicks[both], others[both]
        return GroupValues(won / (clicks * others), clicks + others)


class _AtK(GroupedMetric):
    """A value of the k samples of each group that score highest; all groups alike."""

    def __init__(self, k: int, *, samples: int = 1 << 20) -> None:
        """Makes the metric.

        Args:
            k: how many samples of a group count, at least 1.
            samples: see ``GroupedMetric``.

        Raises:
            InvalidArgumentError: out of range.
        """
        _check_whole(self, "k", k, 1, _MOST_SAMPLES)
        super().__init__(samples=samples)
        self.k = k

    def _options(self) -> dict[str, Any]:
        return {"k": self.k, "samples": self.samples}


class NDCG(_AtK):
    """The mean of every group's NDCG@k. Labels: gains, at least 0.

    DCG@k = Σ gain(i) / log2(i + 1) over places i = 1 … k of a group's samples, highest
    scores first; NDCG@k = DCG@k / that of the order by gains. Samples of equal score
    have the mean gain of theirs, which is the mean over all orders of them. For the
    exponential gains 2**relevance - 1 of Burges et al. (ICML 2005) pass them as labels.
    Groups without a gain do not count (where scikit-learn counts 0); nan where none
    counts. No weights. Else as ``GroupedMetric``.

    Source: Järvelin, Kekäläinen, Cumulated gain-based evaluation of IR techniques (TOIS
    2002), section 2, with the discount of every place; ties: McSherry, Najork,
    Computing information retrieval performance measures efficiently in the presence of
    tied scores (ECIR 2008), section 2.
    """

    def _labels(self, samples: Samples) -> Array:
        return samples.gains

    def _values(self, rows: Rows, starts: Starts) -> GroupValues:
        sizes = np.diff(np.append(starts, len(rows.groups)))
        owners = np.repeat(np.arange(len(starts)), sizes)
        top = float(np.add.reduceat(rows.weights, starts).max())
        places = np.arange(2, 2 + int(min(self.k, top)))
        discounts = np.concatenate([[0.0], np.cumsum(1 / np.log2(places))])

        best = np.lexsort((-rows.labels, owners))
        ideal = self._gained(rows.labels[best], rows.weights[best], starts, discounts)
        # Highest scores first: rows of a group in their order, from its last one on.
        turned = np.lexsort((-np.arange(len(owners)), owners))
        ties = _ties(rows.taken(turned))
        gains = np.add.reduceat((rows.labels * rows.weights)[turned], ties)
        counts = np.add.reduceat(rows.weights[turned], ties)
        starts = np.searchsorted(ties, starts)
        found = self._gained(gains / counts, counts, starts, discounts)
        some = ideal > 0
        values = np.minimum(found[some] / ideal[some], 1.0)  # but for rounding
        return GroupValues(values, np.ones_like(values))

    def _gained(
        self, gains: Array, counts: Array, starts: Starts, discounts: Array
    ) -> Array:
        """DCG of groups whose rows are in order and take so many places each."""
        first = _before(counts, starts)
        most = len(discounts) - 1
        begins = np.minimum(first, most).astype(np.intp)
        ends = np.minimum(first + counts, most).astype(np.intp)
        terms = gains * (discounts[ends] - discounts[begins])
        return np.asarray(np.add.reduceat(terms, starts))


class Recall(_AtK):
    """The mean of every group's recall@k. Labels 0 or 1.

    recall@k = samples of label 1 among the k that score highest / all of label 1 of the
    group. Where samples of equal score are divided by place k they count by the share
    of them that has a place, which is the mean over all orders of them. Groups without
    a label 1 do not count; nan where none counts. No weights. Else as
    ``GroupedMetric``.

    Source: Manning, Raghavan, Schütze, Introduction to information retrieval (2008),
    sections 8.3 and 8.4; ties: McSherry, Najork (ECIR 2008), section 2.
    """

    def _labels(self, samples: Samples) -> Array:
        return samples.clicked.astype(np.float64)

    def _values(self, rows: Rows, starts: Starts) -> GroupValues:
        ties = _ties(rows)
        counts = np.add.reduceat(rows.weights, ties)
        clicks = np.add.reduceat(rows.weights * rows.labels, ties)
        starts = np.searchsorted(ties, starts)
        totals = np.add.reduceat(counts, starts)
        sizes = np.diff(np.append(starts, len(ties)))
        # Rows are in the order of scores: what is above is what does not come before.
        above = np.repeat(totals, sizes) - _before(counts, starts) - counts
        placed = np.clip(self.k - above, 0, counts)
        found = np.add.reduceat(clicks * placed / counts, starts)
        relevant = np.add.reduceat(clicks, starts)
        some = relevant > 0
        values = found[some] / relevant[some]
        return GroupValues(values, np.ones_like(values))


def _ties(rows: Rows) -> Starts:
    """Where another score or group begins."""
    changes = (rows.groups[1:] != rows.groups[:-1]) | (
        rows.scores[1:] != rows.scores[:-1]
    )
    return np.flatnonzero(np.concatenate([[True], changes]))


def _before(counts: Array, starts: Starts) -> Array:
    """Of each row the sum of those before it in its group."""
    before = np.cumsum(counts) - counts
    sizes = np.diff(np.append(starts, len(counts)))
    return np.asarray(before - np.repeat(before[starts], sizes))


def _mean(values: Array, weights: Array) -> float:
    total, weight = exact.ExactSum(), exact.ExactSum()
    if len(values):
        total.add(values * weights)
        weight.add(weights)
    return total.over(weight)


def _check_whole(metric: object, name: str, given: Any, least: int, most: int) -> None:
    whole = isinstance(given, int) and not isinstance(given, bool)
    if not whole or not least <= given <= most:
        raise InvalidArgumentError(
            f"{type(metric).__name__}: {name} must be a whole number of {least} to "
            f"{most}, got {given!r}"
        )
