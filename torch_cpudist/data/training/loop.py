# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loop over a dataset: batches to steps, what they return to lines and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypedDict

from torch_cpudist.data.training.reporting import (
    Fetch,
    Handler,
    HandlerThread,
    Means,
    Progress,
    Spent,
    metric_text,
    named,
)
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.launch.context import last
from torch_cpudist.metrics import Metric, Metrics
from torch_cpudist.model.bags import batch_size

# Computes several batches at once, and returns what came of each.
Compute = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class DatasetRun:
    """What a run over a dataset has measured, on this trainer.

    Attributes:
        epochs: that were read to their end.
        batches: that were computed.
        steps: fewer than batches with replicas, which take one each.
        samples: in all batches.
        seconds: from the first request for a batch to the end of the last step.
        samples_per_s: samples / seconds.
        waiting_share: share of the seconds that were spent waiting for batches, 0 to 1.
        values: means of fetched values, weighed by samples.
        metrics: what the metrics found, by name; empty without any.
    """

    epochs: int
    batches: int
    steps: int
    samples: int
    seconds: float
    samples_per_s: float
    waiting_share: float
    values: Mapping[str, float]
    metrics: Mapping[str, Any]


class Arguments(TypedDict, total=False):
    """What ``train_from_dataset`` takes by name."""

    epochs: int
    max_batches: int | None
    fetch: Mapping[str, str] | Sequence[str] | None
    print_every: int | None
    log: Callable[[str], object]
    metrics: Metric[Any] | Mapping[str, Metric[Any]] | None
    all_trainers: bool
    handler: Handler | None
    handler_period_s: float
    progress: bool | None
    count_samples: Callable[[Any], int]


@dataclass(frozen=True)
class Options:
    """Arguments of ``train_from_dataset``, checked.

    Raises:
        InvalidArgumentError: one is out of range.
    """

    epochs: int = 1
    max_batches: int | None = None
    fetch: Mapping[str, str] | Sequence[str] | None = None
    print_every: int | None = 100
    log: Callable[[str], object] = print
    metrics: Metric[Any] | Mapping[str, Metric[Any]] | None = None
    all_trainers: bool = False
    handler: Handler | None = None
    handler_period_s: float = 60.0
    progress: bool | None = None
    count_samples: Callable[[Any], int] = batch_size

    def __post_init__(self) -> None:
        """Checks."""
        for name in ("epochs", "max_batches", "print_every"):
            value = getattr(self, name)
            if value is None and name != "epochs":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgumentError(
                    f"{name} must be a whole number of at least 1, got {value!r}"
                )
        if not self.handler_period_s > 0:
            raise InvalidArgumentError(
                f"handler_period_s must be above 0, got {self.handler_period_s!r}"
            )
        for name in ("log", "count_samples", "handler"):
            value = getattr(self, name)
            if not callable(value) and not (name == "handler" and value is None):
                raise InvalidArgumentError(
                    f"{name} must be a function, got {type(value).__name__}"
                )
        if self.all_trainers and self.metrics is None:
            raise InvalidArgumentError(
                "all_trainers=True is about metrics=, of which there are none."
            )


class DatasetLoop:
    """One run. Not thread-safe."""

    def __init__(
        self, what: str, compute: Compute, width: int, options: Options
    ) -> None:
        """Prepares it.

        Args:
            what: the bar's title.
            compute: a step on 1 to ``width`` batches.
            width: batches of a step.
            options: the caller's.
        """
        self._what = what
        self._compute = compute
        self._width = width
        self._options = options
        self._fetch = Fetch(options.fetch)
        self._metrics = _collection(options.metrics)
        self._counted = Spent()
        self._batches = self._steps = self._epochs = 0
        self._means, self._recent = Means(), Means()
        self._printed = Spent()
        self._began = 0.0

    def run(self, dataset: Iterable[Any]) -> DatasetRun:
        """Goes over the dataset."""
        options = self._options
        if options.epochs > 1 and isinstance(dataset, Iterator):
            raise InvalidArgumentError(
                f"epochs={options.epochs}, but dataset is an iterator "
                f"({type(dataset).__name__}), which can be read once. Pass an iterable "
                "that begins anew, as a DataLoader."
            )
        bar = Progress(options.progress, self._what, self._total(dataset))
        handler, failed = None, True
        try:
            if options.handler is not None:
                handler = HandlerThread(options.handler, options.handler_period_s)
            self._began = time.perf_counter()
            with self._shown():
                for _ in range(options.epochs):
                    if self._left() == 0:
                        break
                    self._epoch(dataset, bar, handler)
                self._note_time()
            failed = False
        finally:
            bar.close()
            if handler is not None:
                handler.close(failed)
        return self._result()

    def _shown(self) -> AbstractContextManager[None]:
        """While it is entered, this loop counts as one of its thread's run."""
        context = last()
        if context is None or context.closed:
            return nullcontext()
        return context.loops.running(self._counters)

    def _counters(self) -> dict[str, float]:
        counted = self._counted
        return {
            "batches": self._batches,
            "samples": counted.samples,
            "seconds": counted.seconds,
            "waiting": counted.waiting,
        }

    def _left(self) -> int:
        """Batches that the next step may take."""
        most = self._options.max_batches
        return self._width if most is None else min(self._width, most - self._batches)

    def _total(self, dataset: Iterable[Any]) -> int | None:
        """How many batches there will be, if the dataset says."""
        most = self._options.max_batches
        try:
            total = len(dataset) * self._options.epochs  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return most
        return total if most is None else min(most, total)

    def _epoch(
        self, dataset: Iterable[Any], bar: Progress, handler: HandlerThread | None
    ) -> None:
        source = iter(dataset)
        try:
            while count := self._left():
                parts = self._take(source, count)
                if parts:
                    self._step(parts, bar, handler)
                if len(parts) < count:
                    self._epochs += 1
                    return
        finally:
            close = getattr(source, "close", None)
            if callable(close):
                close()

    def _take(self, source: Iterator[Any], count: int) -> list[Any]:
        """The next batches; fewer at the end."""
        parts = []
        began = time.perf_counter()
        for part in source:
            parts.append(part)
            if len(parts) == count:
                break
        self._counted.waiting += time.perf_counter() - began
        return parts

    def _step(
        self, parts: Sequence[Any], bar: Progress, handler: HandlerThread | None
    ) -> None:
        counts = [self._options.count_samples(part) for part in parts]
        newest = Means()
        for returned, samples in zip(self._compute(parts), counts, strict=True):
            found = named(returned)
            values = self._fetch.of(found)
            for means in (newest, self._means, self._recent):
                means.add(values, samples)
            if self._metrics is not None:
                _update(self._metrics, found)
        before = self._batches
        self._batches += len(parts)
        self._steps += 1
        self._counted.samples += sum(counts)
        self._note_time()
        every = self._options.print_every
        if every is not None and self._batches // every > before // every:
            self._print(bar)
        bar.update(len(parts), self._counted)
        if handler is not None:
            handler.tell(newest.values())

    def _note_time(self) -> None:
        self._counted.seconds = time.perf_counter() - self._began

    def _print(self, bar: Progress) -> None:
        context = last()
        several = context is not None and context.trainer_count > 1
        words = [f"trainer {context.trainer_rank}:"] if context and several else []
        if self._options.epochs > 1:
            words.append(f"epoch {self._epochs + 1},")
        words.append(f"batch {self._batches}:")
        for name, value in self._recent.values().items():
            words.append(f"{self._fetch.label(name)} {value:.6g},")
        if self._metrics is not None:
            for name, found in self._metrics.compute().items():
                words.append(f"{name} {metric_text(found)},")
        words.append(self._counted.since(self._printed).text())
        bar.print(self._options.log, " ".join(words))
        self._printed = self._counted.copy()
        self._recent = Means()

    def _result(self) -> DatasetRun:
        found: Mapping[str, Any] = {}
        if self._metrics is not None:
            shared = self._options.all_trainers
            found = self._metrics.compute_all() if shared else self._metrics.compute()
        return DatasetRun(
            epochs=self._epochs,
            batches=self._batches,
            steps=self._steps,
            samples=self._counted.samples,
            seconds=self._counted.seconds,
            samples_per_s=self._counted.rate,
            waiting_share=self._counted.share,
            values=self._means.values(),
            metrics=found,
        )


def _collection(given: Metric[Any] | Mapping[str, Metric[Any]] | None) -> Any:
    """Metrics by name; one by itself is called as its class."""
    if given is None or isinstance(given, Metrics):
        return given
    if isinstance(given, Metric):
        return Metrics({type(given).__name__: given})
    return Metrics(given)


def _update(metrics: Metrics, returned: Mapping[str, Any]) -> None:
    """Gives metrics what a step returned for them."""
    if "predictions" not in returned or "labels" not in returned:
        raise InvalidArgumentError(
            'metrics: step must return a dict with "predictions" and "labels"; it '
            f"returned {sorted(map(str, returned)) or 'nothing'}."
        )
    metrics.update(
        returned["predictions"],
        returned["labels"],
        returned.get("weights"),
        groups=returned.get("groups") if metrics.grouped else None,
    )
