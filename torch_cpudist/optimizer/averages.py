# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``DistributedOptimizer.averaged``: the servers' averages in the place of values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_cpudist.drivers.base import Driver
from torch_cpudist.errors import Error, InvalidArgumentError, ModelChangedError
from torch_cpudist.log import logger
from torch_cpudist.served.set import ParameterSet


class Averages:
    """Switches a model between its values and their averages. Not thread-safe."""

    def __init__(self, driver: Driver, kept: bool) -> None:
        """Switches what ``driver`` drives; ``kept``: whether servers have averages."""
        self._driver = driver
        self._kept = kept
        self._entered = False

    @property
    def are_here(self) -> bool:
        """Whether the model has them now."""
        return self._entered

    def check_not_entered(self, what: str) -> None:
        """Refuses ``what`` while the model has averages.

        Raises:
            InvalidArgumentError: it has.
        """
        if self._entered:
            raise InvalidArgumentError(
                f"{what} inside of opt.averaged(): the model has the averages of its "
                f"parameters there, for evaluating and saving. Leave it before {what}."
            )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """See ``DistributedOptimizer.averaged``."""
        parameters = self._driver.pulled
        if parameters is None or not self._kept:
            raise InvalidArgumentError(
                "averaged: this DistributedOptimizer keeps no average. Build it with "
                "average=cpudist.EMA(0.999)."
            )
        self.check_not_entered("averaged")
        parameters.check_unchanged()
        self._driver.settle()
        try:
            self._entered = True
            _read(parameters, averages=True)
        except BaseException:
            self._entered = False
            with contextlib.suppress(Error):
                _read(parameters, averages=False)
            raise
        try:
            yield
        except BaseException:
            if written := self._leave(parameters):
                logger.warning("%s", _lost(written))
            raise
        if written := self._leave(parameters):
            raise ModelChangedError(_lost(written))

    def _leave(self, parameters: ParameterSet) -> list[str]:
        """Gives the model its values back; names what was written meanwhile."""
        self._entered = False
        if parameters.closed:
            return []  # a shutdown inside leaves the model with averages
        written = parameters.changed()
        _read(parameters, averages=False)
        if written:
            parameters.accept_changes()  # rows are stale, dense values are here anew
        return written


def _lost(written: list[str]) -> str:
    return (
        f"{len(written)} parameters were written inside of opt.averaged() (first: "
        f"{written[0]!r}), in the place of averages, which go with it: the model has "
        "its values back, but what was written. Load and write weights outside of it, "
        "and call opt.store_model() then."
    )


def _read(parameters: ParameterSet, averages: bool) -> None:
    parameters.opened.read_averages(averages)
    parameters.tables_current = False
    parameters.pull_dense()
