# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run over a dataset shows: means of values, a progress bar, a handler."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_cpudist.errors import (
    BackendUnavailableError,
    InvalidArgumentError,
    OperationTimeoutError,
)
from torch_cpudist.launch.context import last, set_last
from torch_cpudist.log import logger

Handler = Callable[[Mapping[str, float]], None]
# What a step returns for metrics is not shown unless it is asked for.
_FOR_METRICS = ("predictions", "labels", "weights", "groups")
# How long the end of a run waits for a handler that is at work.
_HANDLER_END_S = 30.0


def named(returned: Any) -> Mapping[str, Any]:
    """What a step returned, by name; a loss by itself is ``"loss"``."""
    if isinstance(returned, Mapping):
        return returned
    if isinstance(returned, (tuple, list)) and returned:
        return {"loss": returned[0]}
    return {} if returned is None else {"loss": returned}


def _elements(value: Any) -> int:
    """How many numbers a value has; 0 if it is something else."""
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return int(value.size)
    return int(isinstance(value, (bool, int, float, np.number)))


def _mean(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.detach().double().mean())
    return float(np.mean(value))


class Fetch:
    """Which values of a step are wanted, and what they are called in lines."""

    def __init__(self, wanted: Mapping[str, str] | Sequence[str] | None) -> None:
        """All single numbers, or those of a list, or ``{name: label}``.

        Raises:
            InvalidArgumentError: it is something else.
        """
        self._labels: dict[str, str] | None = None
        if wanted is not None:
            if isinstance(wanted, str) or not isinstance(wanted, (Sequence, Mapping)):
                raise InvalidArgumentError(
                    "fetch: expected a list of names or {name: label}, found "
                    f"{wanted!r}."
                )
            pairs = wanted if isinstance(wanted, Mapping) else {n: n for n in wanted}
            self._labels = dict(pairs)

    def of(self, returned: Mapping[str, Any]) -> dict[str, float]:
        """The wanted values of one step, by name.

        Raises:
            InvalidArgumentError: one is not there, or is no number or tensor.
        """
        if self._labels is None:
            return {
                name: _mean(value)
                for name, value in returned.items()
                if name not in _FOR_METRICS and _elements(value) == 1
            }
        for name in self._labels:
            if not _elements(returned.get(name)):
                raise InvalidArgumentError(
                    f"fetch: step returned no number or tensor as {name!r}; it "
                    f"returned {sorted(map(str, returned)) or 'nothing'}."
                )
        return {name: _mean(returned[name]) for name in self._labels}

    def label(self, name: str) -> str:
        """How a value is called in a line."""
        return self._labels[name] if self._labels else name


class Means:
    """Means of values by name, weighed by samples."""

    def __init__(self) -> None:
        """Of nothing."""
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float], samples: int) -> None:
        """Adds the values of a batch; one without samples does not count."""
        if samples:
            for name, value in values.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value * samples, count + samples)

    def values(self) -> dict[str, float]:
        """The means."""
        return {name: total / count for name, (total, count) in self._sums.items()}


@dataclasses.dataclass
class Spent:
    """Samples, and the seconds that they took, of which some were waiting for data."""

    samples: int = 0
    seconds: float = 0.0
    waiting: float = 0.0

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def share(self) -> float:
        """Of the time that was waiting."""
        return self.waiting / self.seconds if self.seconds else 0.0

    def text(self) -> str:
        """For lines and bars."""
        return f"{self.rate:,.0f} samples/s, waiting {100 * self.share:.1f} %"

    def copy(self) -> Spent:
        """What has been spent by now."""
        return dataclasses.replace(self)

    def since(self, earlier: Spent) -> Spent:
        """What came after an earlier copy."""
        return Spent(
            self.samples - earlier.samples,
            self.seconds - earlier.seconds,
            self.waiting - earlier.waiting,
        )


def metric_text(value: Any) -> str:
    """The value of a metric in a line; of a report its first field."""
    if dataclasses.is_dataclass(value):
        value = getattr(value, dataclasses.fields(value)[0].name)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Progress:
    """A bar of tqdm on standard error, or nothing."""

    def __init__(self, wanted: bool | None, what: str, total: int | None) -> None:
        """Shows a bar.

        Args:
            wanted: ``None``: on a terminal, if tqdm is installed, on trainer 0.
            what: before the bar.
            total: batches, if that is known.

        Raises:
            BackendUnavailableError: it is wanted, and tqdm is not installed.
        """
        self._bar: Any = None
        if wanted is None:
            context = last()
            first = context is None or context.trainer_rank <= 0
            if not first or sys.stderr is None or not sys.stderr.isatty():
                return
        elif not wanted:
            return
        try:
            tqdm = importlib.import_module("tqdm").tqdm
        except ImportError:
            if wanted:
                raise BackendUnavailableError(
                    "progress=True needs tqdm: pip install tqdm, or this package with "
                    "its extra 'progress'."
                ) from None
            return
        self._bar = tqdm(total=total, desc=what, unit="batch", file=sys.stderr)

    def update(self, batches: int, spent: Spent) -> None:
        """Shows that so many more batches are done."""
        if self._bar is not None:
            self._bar.set_postfix_str(spent.text(), refresh=False)
            self._bar.update(batches)

    def print(self, log: Callable[[str], object], line: str) -> None:
        """Logs a line; what is printed on a terminal goes above the bar."""
        if self._bar is None or log is not print:
            log(line)
        else:
            self._bar.write(line, file=sys.stdout)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()


class HandlerThread:
    """Calls a handler with the newest values every so often, in a thread of its own."""

    def __init__(self, handler: Handler, period_s: float) -> None:
        """Starts the thread, with the caller's context."""
        self._handler = handler
        self._period_s = period_s
        self._context = last()
        self._values: dict[str, float] = {}
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name="cpudist-handler", daemon=True
        )
        self._thread.start()

    def tell(self, values: dict[str, float]) -> None:
        """Hands the newest values over.

        Raises:
            BaseException: what the handler raised.
        """
        self._values = values  # replaced as a whole, since the thread reads them
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _serve(self) -> None:
        set_last(self._context)
        while not self._end.wait(self._period_s):
            values = self._values
            if not values:
                continue
            try:
                self._handler(dict(values))
            except BaseException as error:
                self._error = error
                return

    def close(self, failed: bool) -> None:
        """Ends the thread, and waits for a handler that is at work.

        Args:
            failed: an exception is raised already: what goes wrong here is logged.

        Raises:
            OperationTimeoutError: the handler does not end.
            BaseException: what it raised.
        """
        self._end.set()
        self._thread.join(_HANDLER_END_S)
        message = f"the handler did not end within {_HANDLER_END_S:g} s of the run."
        if self._thread.is_alive() and not failed:
            raise OperationTimeoutError(message)
        if self._thread.is_alive():
            logger.warning("%s", message)
        if not failed:
            self._raise()
