# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What all metrics have in common: locks, merging, state, and sums over trainers."""

from __future__ import annotations

import abc
import threading
import zlib
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from torch_cpudist.collective.shared_group import shared_group
from torch_cpudist.errors import (
    ConfigMismatchError,
    ConfigurationError,
    InternalError,
    InvalidArgumentError,
    NotInitializedError,
)
from torch_cpudist.launch.context import any_open, last
from torch_cpudist.launch.run import Run
from torch_cpudist.metrics.inputs import Samples, samples_of

ResultT = TypeVar("ResultT")
SelfT = TypeVar("SelfT", bound="Metric[Any]")
MetricT = TypeVar("MetricT", bound="Metric[Any]")
Words = NDArray[np.int64]

_WHAT = "compute_all() of a metric"


class Metric(abc.ABC, Generic[ResultT]):
    """A metric of a stream of batches.

    Thread safety: every method from any thread; replicas may update at once.

    Attributes:
        grouped: ``update`` needs the group of each sample.
    """

    grouped = False

    def __init__(self, *, from_logits: bool = False) -> None:
        """See the class that is made.

        Args:
            from_logits: predictions are logits; their sigmoids count.
        """
        if not isinstance(from_logits, bool):
            raise InvalidArgumentError(
                f"metric: from_logits must be True or False, got {from_logits!r}"
            )
        self.from_logits = from_logits
        self._lock = threading.Lock()

    # -- what a class defines ----------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        """The arguments that make another one like this."""
        return {"from_logits": self.from_logits}

    @abc.abstractmethod
    def _prepare(self, samples: Samples) -> Any:
        """Checks samples and computes their terms; without the lock."""

    @abc.abstractmethod
    def _add(self, prepared: Any) -> None:
        """Adds what ``_prepare`` returned, under the lock."""

    @abc.abstractmethod
    def _result(self) -> ResultT:
        """The value; under the lock."""

    @abc.abstractmethod
    def _clear(self) -> None:
        """Forgets all samples; under the lock."""

    @abc.abstractmethod
    def _pack(self) -> Words:
        """All that is to be merged elsewhere; under the lock."""

    @abc.abstractmethod
    def _merge(self, words: Words) -> None:
        """Adds what ``_pack`` of a metric with the same options returned."""

    # -- the face ----------------------------------------------------------------------

    def update(
        self, predictions: Any, labels: Any, weights: Any = None, *, groups: Any = None
    ) -> None:
        """Adds samples. Local; nothing is added if one of them is refused.

        Args:
            predictions: tensor, array or list of any shape and real type; the graph of
                a tensor is not kept.
            labels: as many: booleans, whole numbers or floats.
            weights: as many, at least 0; default: all 1.
            groups: as many whole numbers, of metrics within groups; in a collection
                the others do without them.

        Raises:
            InvalidArgumentError: shapes that differ in more than dimensions of size 1,
                a value that is not finite, a prediction that is no probability where
                one is needed and ``from_logits`` is not set, a label out of range, a
                negative weight, groups where none are used, or none where they are.
        """
        if groups is not None and not self.grouped:
            raise InvalidArgumentError(
                f"{self!r} knows no groups. GAUC, NDCG and Recall do; leave groups= "
                "out, or put them into one collection with it."
            )
        self._take(samples_of(predictions, labels, weights, groups))

    def _take(self, samples: Samples) -> None:
        prepared = self._prepare(samples)
        with self._lock:
            self._add(prepared)

    def compute(self) -> ResultT:
        """The value over the samples of this trainer; nan where there are none."""
        with self._lock:
            return self._result()

    def compute_all(self) -> ResultT:
        """The value over the samples of all trainers, the same bits on each.

        Collective: every trainer calls it, in the same order as the others, with or
        without samples. The first call makes a group. Without ``init()``, and with one
        trainer, as ``compute()``. Samples stay where they are: it may be called again.

        Cost: two all-gathers, of 16 bytes and of the metric's state; its class says how
        large that is.

        Raises:
            ConfigMismatchError: trainers have other metrics or options; on all.
            PeerLostError: a trainer is lost.
            OperationTimeoutError: a trainer does not come within
                ``CPUDIST_ROUND_DEADLINE_MS``.
            ConfigurationError: this is a dedicated server, or trainers are in jobs of
                their own (``CPUDIST_ROLE``).
            BackendUnavailableError: trainers are threads over an in-process network, or
                their backend has no collectives on CPUs.
            NotInitializedError: ``init()`` was called in another thread only.
            ClosedError: after ``shutdown()`` of a run of several trainers.
        """
        return _over_trainers(self).compute()

    def reset(self) -> None:
        """Forgets all samples."""
        with self._lock:
            self._clear()

    def merge(self, other: Metric[ResultT]) -> None:
        """Adds the samples of another metric of the same class and options.

        Raises:
            InvalidArgumentError: it is of another class, or has other options.
        """
        if not isinstance(other, Metric) or repr(other) != repr(self):
            raise InvalidArgumentError(
                f"merge: {self!r} cannot take the samples of {other!r}. Make both "
                "with the same options."
            )
        self.merge_packed(other.packed())

    def empty(self: SelfT) -> SelfT:
        """Another one of the same options, without samples."""
        return type(self)(**self._options())

    def packed(self) -> Words:
        """What ``merge_packed`` takes: int64 words."""
        with self._lock:
            return self._pack()

    def merge_packed(self, words: Words) -> None:
        """Adds what ``packed`` of a metric of the same options returned.

        Raises:
            InvalidArgumentError: the words are of something else; nothing was added.
        """
        with self._lock:
            self._merge(words)

    def state_dict(self) -> dict[str, Any]:
        """All samples so far, as sums, for ``torch.save``."""
        return {"metric": repr(self), "words": torch.from_numpy(self.packed().copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the samples by those of a state.

        Raises:
            InvalidArgumentError: it is not a state of this class and these options;
                nothing was changed.
        """
        found, words = state.get("metric"), state.get("words")
        if found != repr(self) or not isinstance(words, torch.Tensor):
            raise InvalidArgumentError(
                f"load_state_dict: expected the state of {self!r}, found that of "
                f"{found}. Make the metric with the options that it was saved with."
            )
        if words.dtype != torch.int64 or words.dim() != 1:
            raise InvalidArgumentError(
                f"load_state_dict: expected int64 words [n], found {words.dtype} "
                f"{list(words.shape)}."
            )
        loaded = self.empty()
        loaded.merge_packed(words.cpu().numpy())
        words_now = loaded.packed()
        with self._lock:
            self._clear()
            self._merge(words_now)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._named())
        return f"{type(self).__name__}({options})"

    def _named(self) -> list[tuple[str, Any]]:
        return list(self._options().items())


def check_words(metric: object, words: Words, expected: int) -> None:
    """Raises ``InvalidArgumentError`` for state of another length."""
    if len(words) != expected:
        raise InvalidArgumentError(
            f"{metric!r}: expected a state of {expected} words, found {len(words)}."
        )


def _over_trainers(metric: MetricT) -> MetricT:
    """A metric that has the samples of all trainers; with one trainer, the same one.

    States are merged in rank order, so that all trainers find the same bits.

    Raises:
        Error: see ``Metric.compute_all``.
    """
    run = _shared_run()
    if run is None:
        return metric
    said = repr(metric)
    words = metric.packed()
    group = shared_group(run)
    sizes = group.gather(_WHAT, np.array([len(words), zlib.crc32(said.encode())]))
    other = next((r for r, one in enumerate(sizes) if one[1] != sizes[0][1]), None)
    if other is not None:
        raise ConfigMismatchError(
            f"{_WHAT}: trainer {other} has other metrics than trainer 0, or other "
            f"options; trainer {run.trainer_rank} has {said}. Make equal ones on "
            "all, and call compute_all() in the same order."
        )
    lengths = [int(one[0]) for one in sizes]
    padded = np.zeros(max(lengths), np.int64)
    padded[: len(words)] = words
    total = metric.empty()
    for length, part in zip(lengths, group.gather(_WHAT, padded), strict=True):
        try:
            total.merge_packed(part[:length])
        except InvalidArgumentError as error:
            raise InternalError(f"{_WHAT}: {error}") from error
    return total


def _shared_run() -> Run | None:
    """The calling thread's, if it has other trainers."""
    run = last()
    if run is None:
        if any_open():
            raise NotInitializedError(
                f"{_WHAT}: init() was called in another thread than this one, which "
                "would count its own samples only. Use: with context: (init() returns "
                "the context), or compute() for the samples of this trainer."
            )
        return None
    if run.role != "trainer":
        raise ConfigurationError(
            f"{_WHAT} on rank {run.rank}, a dedicated server: metrics are the "
            "trainers'."
        )
    if run.trainer_count == 1 and run.environment.apart is None:
        return None
    run.check_usable()
    if run.environment.apart is not None:
        raise ConfigurationError(
            f"{_WHAT} gathers over torch.distributed, whose group is that of one "
            "torchrun job, but CPUDIST_ROLE starts trainers in jobs of their own. Save "
            "state_dict() of every trainer's metric and merge() them."
        )
    return run
