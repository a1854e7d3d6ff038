# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AllReduce: gradients are averaged, and every trainer steps with the mean."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torch_cpudist.collective.buckets import plan, squared_norm
from torch_cpudist.collective.carriers import RoundedCarrier, SumCarrier
from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.collective.exchange import GradientExchange, MakeCarrier
from torch_cpudist.collective.header import Header
from torch_cpudist.collective.rows import RowExchange, Rows, as_gradient, own_rows
from torch_cpudist.collective.state import share_state
from torch_cpudist.drivers.base import whole_samples
from torch_cpudist.drivers.collective import CollectiveDriver
from torch_cpudist.drivers.guard import InnerGuard
from torch_cpudist.model.gradients import replaced_gradients
from torch_cpudist.model.placement import Rules
from torch_cpudist.rules.state_parts import States
from torch_cpudist.settings.clip import Clip, ClipNorm, ClipValue
from torch_cpudist.strategies.allreduce import AllReduce

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run


def averaging(strategy: AllReduce) -> MakeCarrier:
    """What sums the buckets of a strategy."""
    return RoundedCarrier if strategy.compression == "bf16" else SumCarrier


class GradientDriver(CollectiveDriver):
    """Averages gradients in every step; what is done with the mean is a subclass's."""

    def __init__(
        self,
        parameters: CopiedParameters,
        exchange: GradientExchange,
        guard: InnerGuard,
        states: States,
        others: Sequence[torch.Tensor],
    ) -> None:
        """See ``CollectiveDriver``; takes trainer 0's optimizer state, too."""
        super().__init__(parameters, guard, states, others)
        self._exchange = exchange
        self._tables = parameters.placement.tables
        self._rows = RowExchange(parameters.group, self._tables)
        share_state(self._group, parameters.inners, parameters.entries)

    def no_sync(self) -> AbstractContextManager[None]:
        """While it is entered, backward sends nothing."""
        return self._exchange.silent()

    def step(self, rules: Rules, samples: int | None, clip: Clip | None) -> int:
        """Averages gradients, and steps the wrapped optimizers with them.

        ``samples`` weighs this trainer; ``None`` weighs all equally. The ``grad`` of
        parameters stays this trainer's own. Else as ``Driver.step``.
        """
        if samples is not None:
            samples = whole_samples(samples)
        self._copied.check_unchanged()
        self._take_part()
        own = own_rows(self._tables)
        header = self._exchange.average(self._gradients(), own, samples)
        self._averages += 1
        if header is not None:
            weight = 1 if samples is None else samples
            rows = self._rows.average(own, header.counts, weight, header.weight)
            self._update(header, rows, clip)
        self._steps += 1
        return self._steps

    @abstractmethod
    def _update(self, header: Header, rows: list[Rows], clip: Clip | None) -> None:
        """Steps with the mean.

        Args:
            header: what has a gradient on some trainer.
            rows: by table, the mean.
            clip: how the mean is clipped.
        """

    def stats(self) -> dict[str, Any]:
        """Also ``buckets``, and ``repeated``: steps that averaged twice."""
        found = super().stats()
        exchange = self._exchange
        found["collective"]["buckets"] = len(exchange.buckets)
        found["collective"]["repeated"] = exchange.repeated
        return found


class AllReduceDriver(GradientDriver):
    """Runs the AllReduce strategy."""

    def __init__(
        self,
        parameters: CopiedParameters,
        strategy: AllReduce,
        guard: InnerGuard,
        states: States,
        others: Sequence[torch.Tensor],
    ) -> None:
        """See ``CollectiveDriver``."""
        entries = parameters.placement.dense
        buckets = plan(entries, strategy.bucket_bytes, halves=True)
        exchange = GradientExchange(parameters, buckets, averaging(strategy))
        super().__init__(parameters, exchange, guard, states, others)

    def _update(self, header: Header, rows: list[Rows], clip: Clip | None) -> None:
        flat = [bucket.flat for bucket in self._exchange.buckets]
        flat += [values.view(-1) for _, values in rows]
        if isinstance(clip, ClipNorm):
            clip_average(clip, flat, sum(map(squared_norm, flat)))
        else:
            clip_average(clip, flat, 0.0)
        found: list[torch.Tensor | None] = [None] * len(self._dense)
        for bucket, i in self._exchange.pieces(header.dense):
            found[bucket.pieces[i].entry.index] = bucket.view(i)
        weights = [table.found.weight for table in self._tables]
        for i, (one, table) in enumerate(zip(rows, weights, strict=True)):
            found.append(as_gradient(one, table) if i in header.tables else None)
        with replaced_gradients([*self._dense, *weights], found):
            self._step_inners()

    def put_state(self, run: Run, inners: Sequence[Optimizer], states: States) -> None:
        """Takes trainer 0's state; weights as ``store_model``."""
        super().put_state(run, inners, states)
        share_state(self._group, inners, self._copied.entries)


def clip_average(
    clip: Clip | None, flat: Sequence[torch.Tensor], squared: float
) -> None:
    """Clips averaged gradients in place, with equal bits on all trainers.

    Args:
        clip: how.
        flat: the gradients, or this trainer's part of them.
        squared: the squared norm of all, where ``clip`` is a norm.
    """
    if isinstance(clip, ClipNorm):
        scale = clip.max_norm / (math.sqrt(squared) + 1e-6)
        if not scale >= 1.0:
            for part in flat:
                part.mul_(scale)
    elif isinstance(clip, ClipValue):
        for part in flat:
            part.clamp_(-clip.value, clip.value)
