# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a rank shows to Prometheus, as scalars of TensorBoard, from its own loop."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_cpudist.errors import (
    BackendUnavailableError,
    ClosedError,
    InvalidArgumentError,
)
from torch_cpudist.launch import context
from torch_cpudist.monitor.families import Family
from torch_cpudist.monitor.reading import RANK, families_of

Values = Mapping[tuple[str, ...], Any]


def _writer(where: Any, rank: int) -> Any:
    """What writes: the caller's, or one in a folder of this rank.

    Raises:
        BackendUnavailableError: the package tensorboard is not installed.
        InvalidArgumentError: it is neither a writer nor a path.
    """
    if callable(getattr(where, "add_scalar", None)):
        return where
    if not isinstance(where, (str, os.PathLike)):
        raise InvalidArgumentError(
            "TensorBoardWriter: expected a directory or a SummaryWriter, found "
            f"{type(where).__name__}."
        )
    try:
        package = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise BackendUnavailableError(
            f"TensorBoardWriter needs the package tensorboard: {error}. pip install "
            "tensorboard, or this package with its extra 'tensorboard'."
        ) from None
    return package.SummaryWriter(str(Path(where) / f"rank{rank}"))


def _parts(values: Values) -> dict[tuple[str, ...], tuple[float, float]]:
    """Of a histogram, the sum and the number of what is in it."""
    return {
        labels: (found.total, found.buckets[-1][1]) for labels, found in values.items()
    }


class TensorBoardWriter:
    """Writes what this rank does every so many steps.

    The tags are the names of docs/monitoring.md without ``_total``, with labels behind
    them: ``cpudist/bytes/sent``. Counters are written per second since
    the last time, from the second time on that they are there, gauges as they are,
    histograms by the mean of what has come since.

    Cost: of a call that writes about a millisecond, of the others nothing. Thread
    safety: one thread. Usable as a context manager.

    Args:
        where: a ``SummaryWriter`` of torch.utils.tensorboard, or anything with its
            ``add_scalar``, which stays open; or a directory, in which each rank has a
            folder of its own, ``rank0`` and so on.
        every_steps: steps between two writings.

    Raises:
        BackendUnavailableError: the package tensorboard (extra ``tensorboard``) is not
            installed.
        InvalidArgumentError: an argument is wrong.
        NotInitializedError: ``cpudist.init()`` was not called in this thread.
    """

    def __init__(self, where: Any, every_steps: int = 10) -> None:
        """See the class."""
        if isinstance(every_steps, bool) or not isinstance(every_steps, int):
            every_steps = 0
        if every_steps < 1:
            raise InvalidArgumentError(
                "TensorBoardWriter: every_steps must be a whole number of at least 1."
            )
        self._run = context.current()
        self._every_steps = every_steps
        self._writer = _writer(where, self._run.rank)
        self._own = self._writer is not where
        self._closed = False
        self._step = 0
        self._at_s = time.monotonic()
        self._before = {one.name: one for one in families_of(self._run)}

    def step(self, step: int | None = None) -> None:
        """Counts a step; to be called after the optimizer's, by the loop.

        Args:
            step: its number, where the loop knows it; default: calls so far.

        Raises:
            ClosedError: ``close()`` was called.
        """
        if self._closed:
            raise ClosedError("this TensorBoardWriter is closed. Make a new one.")
        self._step = self._step + 1 if step is None else step
        if self._step % self._every_steps == 0:
            self._write()

    def _write(self) -> None:
        families = families_of(self._run)
        now_s = time.monotonic()
        seconds = max(now_s - self._at_s, 1e-9)
        for family in families:
            if family.name != RANK:
                before = self._before.get(family.name)
                for labels, value in _scalars(family, before, seconds).items():
                    name = family.name.replace("cpudist_", "cpudist/", 1)
                    tag = "/".join((name, *labels))
                    self._writer.add_scalar(tag, value, self._step)
        self._at_s = now_s
        self._before = {one.name: one for one in families}

    def close(self) -> None:
        """Closes the file of its own, if it has one. Idempotent."""
        if not self._closed and self._own:
            self._writer.close()
        self._closed = True

    def __enter__(self) -> TensorBoardWriter:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()


def _scalars(
    family: Family, before: Family | None, seconds: float
) -> dict[Sequence[str], float]:
    """One number for each set of labels."""
    earlier: Values = {} if before is None else before.values
    found: dict[Sequence[str], float] = {}
    if family.kind == "histogram":
        old = _parts(earlier)
        for labels, (total, count) in _parts(family.values).items():
            total_before, count_before = old.get(labels, (0.0, 0))
            if count < count_before:  # it began anew
                total_before, count_before = 0.0, 0
            if count > count_before:
                found[labels] = (total - total_before) / (count - count_before)
        return found
    for labels, value in family.values.items():
        if family.kind == "counter":
            last = earlier.get(labels)
            if last is not None:  # else nobody knows since when it has counted
                found[labels] = (value - last if value >= last else value) / seconds
        else:
            found[labels] = float(value)
    return found
