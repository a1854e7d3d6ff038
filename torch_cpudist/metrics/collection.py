# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Several metrics of the same predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.metrics.base import Metric, Words
from torch_cpudist.metrics.inputs import Samples


class Metrics(Metric[dict[str, Any]]):
    """Metrics by name, updated together: ``Metrics({"auc": AUC(), "mae": MAE()})``.

    Samples are checked once, and for all metrics before one of them counts them;
    ``compute_all`` sends the state of all at once. An update and a ``compute`` in
    different threads at once may meet between two metrics.
    """

    def __init__(self, metrics: Mapping[str, Metric[Any]]) -> None:
        """Makes the collection of metrics, which may be used by themselves too.

        Raises:
            InvalidArgumentError: there are none, or one that is no metric, or is given
                twice.
        """
        super().__init__()
        if not isinstance(metrics, Mapping) or not metrics:
            raise InvalidArgumentError(
                'Metrics: expected {"name": metric, ...} with at least one, found '
                f"{metrics!r}."
            )
        for name, metric in metrics.items():
            if not isinstance(name, str) or not isinstance(metric, Metric):
                raise InvalidArgumentError(
                    f"Metrics: expected names and metrics, found {name!r}: {metric!r}."
                )
        if len({id(metric) for metric in metrics.values()}) != len(metrics):
            raise InvalidArgumentError(
                "Metrics: a metric is given twice and would count samples twice."
            )
        self._metrics = dict(metrics)
        self.grouped = any(metric.grouped for metric in metrics.values())

    def __getitem__(self, name: str) -> Metric[Any]:
        """A metric by its name."""
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._metrics)

    def __len__(self) -> int:
        """How many metrics there are."""
        return len(self._metrics)

    def empty(self) -> Metrics:
        """Another one of the same metrics, without samples."""
        return Metrics({name: m.empty() for name, m in self._metrics.items()})

    def _named(self) -> list[tuple[str, Any]]:
        return list(self._metrics.items())

    def _prepare(self, samples: Samples) -> list[Any]:
        return [metric._prepare(samples) for metric in self._metrics.values()]

    def _add(self, prepared: list[Any]) -> None:
        for metric, one in zip(self._metrics.values(), prepared, strict=True):
            with metric._lock:
                metric._add(one)

    def _result(self) -> dict[str, Any]:
        return {name: metric.compute() for name, metric in self._metrics.items()}

    def _clear(self) -> None:
        for metric in self._metrics.values():
            metric.reset()

    def _pack(self) -> Words:
        parts = [metric.packed() for metric in self._metrics.values()]
        return np.concatenate([np.array([len(part) for part in parts]), *parts])

    def _merge(self, words: Words) -> None:
        begin = len(self._metrics)
        sizes = words[:begin].tolist()
        if len(sizes) < begin or min(sizes) < 0 or begin + sum(sizes) != len(words):
            raise InvalidArgumentError(
                f"{self!r}: this is not the state of {begin} metrics."
            )
        parts = np.split(words[begin:], np.cumsum(sizes)[:-1])
        for metric, part in zip(self._metrics.values(), parts, strict=True):
            metric.empty().merge_packed(part)  # all are good before one counts
        for metric, part in zip(self._metrics.values(), parts, strict=True):
            metric.merge_packed(part)
