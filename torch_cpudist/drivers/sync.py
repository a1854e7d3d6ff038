# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sync and HalfAsync: a step is a round, of all trainers or of a group of them."""

from __future__ import annotations

from torch_cpudist.drivers.base import Wrapped, served_rules, whole_samples
from torch_cpudist.drivers.registry import register
from torch_cpudist.drivers.served_saving import ServedSaving
from torch_cpudist.drivers.server import ServedState, ServerDriver, open_set
from torch_cpudist.model.placement import Rules
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.settings.clip import Clip
from torch_cpudist.strategies.half_async import HalfAsync
from torch_cpudist.strategies.sync import Sync


class SyncDriver(ServerDriver):
    """Runs the Sync or HalfAsync strategy for one parameter set.

    The servers know the groups of HalfAsync from the layout. Cost per step: one push
    and its reply per server, plus the pulls of lookups.
    """

    def step(
        self,
        rules: Rules,
        samples: int | None,
        clip: Clip | None,
    ) -> int:
        """Pushes this trainer's gradients and waits until its group's round is applied.

        ``samples`` weighs this trainer in the mean; ``None`` weighs all equally. Else
        as ``Driver.step``.
        """
        if samples is not None:
            samples = whole_samples(samples)
        return self._parameters.push(served_rules(rules), samples, clip) + 1

    @property
    def in_rounds(self) -> bool:
        """They do, in those of its group."""
        return True

    @property
    def is_away(self) -> bool:
        """As servers were told."""
        return not self._parameters.opened.is_member()

    def settle(self) -> None:
        """Pushes are applied when ``step`` returns."""


def _driven(
    strategy: Sync | HalfAsync, parameters: ParameterSet, made: Wrapped
) -> SyncDriver:
    driver = SyncDriver(parameters, ServedState(made, parameters))
    # Groups of HalfAsync are at different steps.
    together = isinstance(strategy, Sync)
    if strategy.communicator.overlap:
        parameters.push_early()
    driver.save_by(ServedSaving(parameters, made.run, together))
    return driver


register(Sync, opens=open_set, drives=_driven)
register(HalfAsync, opens=open_set, drives=_driven)
