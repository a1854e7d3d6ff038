# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What AllReduce and Reduce have in common: gradients are averaged in every step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_cpudist import _core, ranges
from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.collective.exchange import GradientExchange
from torch_cpudist.collective.header import Header
from torch_cpudist.collective.rows import RowExchange, Rows, own_rows
from torch_cpudist.collective.state import share_state
from torch_cpudist.drivers.base import Wrapped, whole_samples
from torch_cpudist.drivers.collective import (
    CollectiveDriver,
    CopiedState,
    of_table,
    open_copied,
)
from torch_cpudist.drivers.registry import Opening
from torch_cpudist.errors import UnsupportedOptimizerError
from torch_cpudist.model.placement import Rules
from torch_cpudist.rules.state_parts import States
from torch_cpudist.settings.clip import (
    Clip,
    ClipNorm,
    ClipTensorNorm,
    ClipValue,
    scale_to,
)
from torch_cpudist.strategies.base import Strategy

# Rules that torch itself runs on sparse gradients.
_TAKE_ROWS = ("adagrad", "ftrl", "row_wise_adagrad", "sgd", "sparse_adam")


def open_equal(strategy: Strategy, opening: Opening) -> CopiedParameters:
    """``open_copied``, of tables that trainers can keep equal by themselves.

    Raises:
        UnsupportedOptimizerError: they cannot.
    """
    placement = opening.placement
    for table in placement.tables:
        rule = placement.rules[table.group]
        lazy = rule is None or rule.momentum or rule.weight_decay or _decays(rule)
        if rule is None or rule.kind not in _TAKE_ROWS or lazy:
            where, remedy = of_table(strategy, table)
            raise UnsupportedOptimizerError(
                f"{where}, where torch updates it, which does not run {rule} on sparse "
                f"gradients. Use plain SGD, Adagrad or SparseAdam for it. {remedy}"
            )
    return open_copied(strategy, opening)


def _decays(rule: _core.OptimizerConfig) -> bool:
    """Whether a rule has an L1 decay, which torch has not."""
    return rule.l1 > 0 and rule.kind != "ftrl"


class SharedState(CopiedState):
    """State that is trainer 0's on every trainer."""

    def __init__(self, made: Wrapped, parameters: CopiedParameters) -> None:
        """Also: takes trainer 0's. Collective."""
        super().__init__(made, parameters)
        self._share()

    def _share(self) -> None:
        share_state(self._copied.group, self._inners, self._copied.entries)

    def put(self, states: States) -> None:
        """Takes trainer 0's state; weights as ``store_model``."""
        super().put(states)
        self._share()


class GradientDriver(CollectiveDriver):
    """Averages gradients in every step; what is done with the mean is a subclass's."""

    def __init__(
        self,
        parameters: CopiedParameters,
        exchange: GradientExchange,
        made: Wrapped,
        keeper: SharedState,
    ) -> None:
        """Averages by ``exchange``; else as ``CollectiveDriver``."""
        super().__init__(parameters, made, keeper)
        self._exchange = exchange
        self._tables = parameters.placement.tables
        self._rows = RowExchange(parameters.group, self._tables)

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
        for table in self._tables:
            rule = rules[table.group]
            if rule is not None and _decays(rule):
                raise UnsupportedOptimizerError(
                    f"table {table.found.name!r}: l1_decay was set after its optimizer "
                    "was wrapped, and torch, which steps it, has no such option."
                )
        self._copied.check_unchanged()
        self._take_part()
        own = own_rows(self._tables)
        with ranges.of(ranges.EXCHANGE):
            header = self._exchange.average(self._gradients(), own, samples)
        self._averages += 1
        if header is not None:
            weight = 1 if samples is None else samples
            with ranges.of(ranges.EXCHANGE):
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

    @property
    def exchange(self) -> GradientExchange:
        """What averages; to be looked at."""
        return self._exchange

    def stats(self) -> dict[str, Any]:
        """Also ``buckets``, and ``repeated``: steps that averaged twice."""
        found = super().stats()
        exchange = self._exchange
        found["collective"]["buckets"] = len(exchange.buckets)
        found["collective"]["repeated"] = exchange.repeated
        return found


def clip_tensors(
    clip: ClipTensorNorm, parts: Sequence[torch.Tensor], squared: Sequence[float]
) -> None:
    """Clips averaged gradients in place, each by its own norm.

    Args:
        clip: how.
        parts: of gradients.
        squared: for each, the squared norm of the whole gradient that it is of.
    """
    for part, norm in zip(parts, squared, strict=True):
        scale = scale_to(math.sqrt(norm), clip.max_norm)
        if scale != 1.0:
            part.mul_(scale)


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
