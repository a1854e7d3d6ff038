# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sync: a step is a round; the servers average the gradients and update once."""

from __future__ import annotations

from torch_cpudist.clip import Clip
from torch_cpudist.placement import Rules
from torch_cpudist.strategies.driver import Driver, served_rules, whole_samples


class SyncDriver(Driver):
    """Runs the Sync strategy for one parameter set.

    Cost per step: one push and its reply per server, plus one pull per server and
    lookup.
    """

    def step(
        self,
        rules: Rules,
        samples: int | None,
        clip: Clip | None,
    ) -> int:
        """Pushes this trainer's gradients and waits until the round is applied.

        ``samples`` weighs this trainer in the mean; ``None`` weighs all equally. Else
        as ``Driver.step``.
        """
        if samples is not None:
            samples = whole_samples(samples)
        return self._parameters.push(served_rules(rules), samples, clip) + 1

    def settle(self) -> None:
        """Pushes are applied when ``step`` returns."""
