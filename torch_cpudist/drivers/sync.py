# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sync and HalfAsync: a step is a round, of all trainers or of a group of them."""

from __future__ import annotations

from torch_cpudist.drivers.base import ServerDriver, served_rules, whole_samples
from torch_cpudist.model.placement import Rules
from torch_cpudist.settings.clip import Clip


class SyncDriver(ServerDriver):
    """Runs the Sync or HalfAsync strategy for one parameter set.

    The servers know the groups of HalfAsync from the layout. Cost per step: one push
    and its reply per server, plus one pull per server and lookup.
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

    def settle(self) -> None:
        """Pushes are applied when ``step`` returns."""
