# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""When servers apply gradients, and whose: what a strategy tells a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_cpudist import _core
from torch_cpudist.settings.average import EMA
from torch_cpudist.settings.communicator import Communicator
from torch_cpudist.settings.delay_compensation import DelayCompensation
from torch_cpudist.settings.outer import Outer


@dataclass(frozen=True)
class Trainers:
    """All trainers of a run.

    Attributes:
        count: how many rounds are made of.
        hosts: host id by trainer rank; ``None`` where trainers are in jobs of their
            own, which do not know each other's hosts.
    """

    count: int
    hosts: tuple[str, ...] | None


@dataclass(frozen=True)
class Updates:
    """When servers apply gradients.

    Attributes:
        on_arrival: each push as it comes, instead of in rounds.
        max_staleness: updates; no gradient is applied later than so many after the
            values that it was computed on were read. ``None`` is no bound.
        exchanges_deltas: trainers step by themselves; a push says what they moved, and
            its reply what the others did.
        outer: what is done with the mean of deltas, in rounds. ``None`` adds each.
        groups: in rounds, the group of every trainer, by rank, numbered in the order of
            their lowest ranks; each has rounds of its own. Empty: all are one.
        delay_compensation: how late gradients are corrected. ``None``: not at all.
        communicator: of which is read what is not of a queue.
        average: of values, which servers keep beside them.
    """

    on_arrival: bool = False
    max_staleness: int | None = None
    exchanges_deltas: bool = False
    outer: Outer | None = None
    groups: tuple[int, ...] = ()
    delay_compensation: DelayCompensation | None = None
    communicator: Communicator = field(default_factory=Communicator)
    average: EMA | None = None

    def served(
        self, rules: Sequence[_core.OptimizerConfig | None]
    ) -> list[_core.OptimizerConfig]:
        """What servers run for each parameter group, given what its optimizer does."""
        if not self.exchanges_deltas:
            return [rule for rule in rules if rule is not None]
        # A push is a negated movement: the update adds it.
        outer = self.outer or Outer()
        rule = _core.OptimizerConfig(
            "sgd", lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov
        )
        return [rule for _ in rules]
