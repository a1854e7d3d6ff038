# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""LocalSGD: every trainer steps by itself, and parameters are averaged now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_cpudist import ranges
from torch_cpudist.collective.buckets import Bucket, plan
from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.drivers.base import Wrapped, whole_samples
from torch_cpudist.drivers.collective import (
    CollectiveDriver,
    CopiedState,
    of_table,
    open_copied,
    warn_of_sharding,
)
from torch_cpudist.drivers.copied_saving import CopiedSaving
from torch_cpudist.drivers.registry import Opening, register
from torch_cpudist.drivers.saving import Saving
from torch_cpudist.errors import ConfigMismatchError, UnsupportedModelError
from torch_cpudist.log import logger
from torch_cpudist.model.clipping import clip_own
from torch_cpudist.model.placement import Rules
from torch_cpudist.settings.clip import Clip
from torch_cpudist.settings.fields import DEFAULT_BUCKET_BYTES
from torch_cpudist.settings.outer import Outer
from torch_cpudist.snapshot.choice import Plan
from torch_cpudist.strategies.local_sgd import LocalSGD

_WHAT = "averaging parameters"
# What outer steps keep of each parameter, in snapshots and, the second, of torch's SGD.
_VALUES, _MOMENTUM = "values", "momentum_buffer"


def _fill(bucket: Bucket) -> None:
    for i, piece in enumerate(bucket.pieces):
        bucket.view(i).copy_(piece.entry.parameter)


class _OuterStep:
    """SGD on one bucket, with the trainers' mean movement, negated, as gradient."""

    @torch.no_grad()
    def __init__(self, bucket: Bucket, outer: Outer) -> None:
        self._bucket = bucket
        self._values = nn.Parameter(torch.zeros(bucket.size, dtype=bucket.dtype))
        self._sgd = torch.optim.SGD(
            [self._values],
            lr=outer.lr,
            momentum=outer.momentum,
            nesterov=outer.nesterov,
        )
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Takes the parameters' values as those of the last average."""
        _fill(self._bucket)
        self._values.copy_(self._bucket.flat)

    def take(self) -> None:
        """Takes the mean in the bucket for the values of an outer step."""
        self._values.copy_(self._bucket.flat)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """A copy of what the next step begins with, by parameter."""
        return {
            piece.entry.name: {
                key: self._part(i, flat).clone() for key, flat in self._kept().items()
            }
            for i, piece in enumerate(self._bucket.pieces)
        }

    def _kept(self) -> dict[str, torch.Tensor]:
        momentum = self._sgd.state.get(self._values, {}).get(_MOMENTUM)
        kept = {_VALUES: self._values.detach()}
        return kept if momentum is None else {**kept, _MOMENTUM: momentum}

    def _part(self, i: int, flat: torch.Tensor) -> torch.Tensor:
        begin, piece = self._bucket.offsets[i], self._bucket.pieces[i]
        return flat[begin : begin + piece.count].view(piece.shape)

    @torch.no_grad()
    def restore(
        self, plan: Plan, saved: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> list[str]:
        """Takes over what ``state`` has returned, of parameters that are taken whole.

        The others go on from the values that stand in the model: those that were
        loaded without state with no momentum.

        Args:
            plan: what is taken; of which ``saved`` has the names.
            saved: by name in the snapshot.

        Returns:
            Names of parameters that it has nothing of.
        """
        missing = []
        for i, piece in enumerate(self._bucket.pieces):
            taken = plan.taken.get(piece.entry.name)
            if taken is None:
                continue
            kept = (saved.get(taken.source) or {}) if taken.state else {}
            if taken.state and not kept:
                missing.append(piece.entry.name)
            if plan.whole and _VALUES in kept:
                self._part(i, self._values).copy_(kept[_VALUES])
            self._put_momentum(i, kept.get(_MOMENTUM))
        return missing

    def _put_momentum(self, i: int, momentum: torch.Tensor | None) -> None:
        """No momentum is one of zeros to the bit, once there is a step."""
        state = self._sgd.state[self._values]
        if state.get(_MOMENTUM) is None:
            if momentum is None:
                return
            state[_MOMENTUM] = torch.zeros_like(self._values)
        part = self._part(i, state[_MOMENTUM])
        if momentum is None:
            part.zero_()
        else:
            part.copy_(momentum)

    def step(self) -> None:
        """Replaces the mean in the bucket by what the outer step makes of it."""
        flat = self._bucket.flat
        self._values.grad = self._values - flat
        self._sgd.step()
        self._values.grad = None
        flat.copy_(self._values)


class _KeptState(CopiedState):
    """State of each trainer, beside parameters that are averaged now and then."""

    def __init__(
        self,
        made: Wrapped,
        parameters: CopiedParameters,
        stored: Callable[[], None],
    ) -> None:
        """Calls ``stored`` when values came from elsewhere."""
        super().__init__(made, parameters)
        self._stored = stored

    def store_model(self, all_rows: bool) -> None:
        """Makes trainer 0's values everybody's; outer steps go on from these."""
        super().store_model(all_rows)
        self._stored()


class _AveragedSaving(CopiedSaving):
    """At averages only: between them trainers have values of their own."""

    def __init__(self, driver: LocalSGDDriver, parameters: CopiedParameters) -> None:
        super().__init__(parameters, driver._progress, driver._go_on, equal=False)
        self._driver = driver

    def ready(self) -> bool:
        """Whether all have the same values."""
        return self._driver.apart == 0

    def make_ready(self) -> None:
        """Averages, as ``leave`` does."""
        self._driver.average_now()

    def take_in(self, plan: Plan) -> None:
        """Makes trainer 0's values everybody's; outer steps go on from these."""
        super().take_in(plan)
        self._driver._begin_anew()

    def restore_own_state(
        self, tree: Mapping[str, Any], own: bool, plan: Plan
    ) -> list[str]:
        """Also what outer steps keep."""
        missing = super().restore_own_state(tree, own, plan)
        progress = tree.get("progress") or {}
        return missing + self._driver._restore_outer(progress.get("outer"), plan)


class LocalSGDDriver(CollectiveDriver):
    """Runs the LocalSGD strategy."""

    def __init__(
        self, strategy: LocalSGD, parameters: CopiedParameters, made: Wrapped
    ) -> None:
        """See ``CollectiveDriver``."""
        keeper = _KeptState(made, parameters, self._begin_anew)
        super().__init__(parameters, made, keeper)
        self._strategy = strategy
        self._since = 0  # steps after the last average of a whole interval
        self._apart = 0  # steps after the last average
        self._buckets: list[Bucket] = plan(
            parameters.placement.dense, DEFAULT_BUCKET_BYTES
        )
        for bucket in self._buckets:
            bucket.allocate(self._group.zeros)
        self._outer: list[_OuterStep] | None = None
        if strategy.outer is not None:
            self._outer = [_OuterStep(b, strategy.outer) for b in self._buckets]
        self._saving = _AveragedSaving(self, parameters)

    def step(self, rules: Rules, samples: int | None, clip: Clip | None) -> int:
        """Steps the wrapped optimizers; averages if it is time.

        ``samples`` only counts; ``clip`` is of this trainer's gradient. Else as
        ``Driver.step``.
        """
        if samples is not None:
            whole_samples(samples)
        self._copied.check_unchanged()
        self._take_part()
        self._gradients()  # refuses what is not dense
        clip_own(clip, list(self._dense))
        self._step_inners()
        self._steps += 1
        self._since += 1
        self._apart += 1
        if self._warm() or self._since >= self._strategy.every:
            with ranges.of(ranges.EXCHANGE):
                self._average(early=False)
        return self._steps

    @property
    def apart(self) -> int:
        """Steps since trainers had the same values."""
        return self._apart

    def average_now(self) -> None:
        """Averages what was moved since the last time, in mid interval. Collective."""
        if self._apart:
            with ranges.of(ranges.EXCHANGE):
                self._average(early=True)

    @torch.no_grad()
    def _average(self, early: bool) -> None:
        """Averages parameters. Collective.

        Args:
            early: the interval is not over. The outer optimizer, whose momentum is one
                of whole intervals, then does not step: its step at the end is over all
                that the interval moved, and averaging in between leaves that mean as
                it is.

        Raises:
            ConfigMismatchError: trainers have taken other numbers of steps.
        """
        early = early and not self._warm()  # a warm-up's averages end intervals
        alone = self._group.alone
        if not alone and not self._agreed_to_average():
            return
        self._apart = 0
        if not early or self._outer is None:
            self._since = 0
        self._averages += 1
        if alone and (early or self._outer is None or self._copied.changed()):
            return
        works = []
        for bucket in self._buckets:
            _fill(bucket)
            if not alone:
                works.append(self._group.start_sum(bucket.flat))
        for i, bucket in enumerate(self._buckets):
            if not alone:
                self._group.wait(works[i], _WHAT)
                bucket.flat.mul_(1.0 / self._group.size)
            if self._outer is not None and not early:
                self._outer_step(self._outer[i])
            for k, piece in enumerate(bucket.pieces):
                piece.entry.parameter.copy_(bucket.view(k))
        self._copied.accept_changes()

    def _outer_step(self, outer: _OuterStep) -> None:
        if self._warm():
            outer.take()
        else:
            outer.step()

    def _warm(self) -> bool:
        return self._steps <= self._strategy.warmup_steps

    def _agreed_to_average(self) -> bool:
        """Whether no trainer's model was written. Collective.

        Raises:
            ConfigMismatchError: trainers have taken other numbers of steps.
        """
        told = torch.zeros(2, self._group.size, dtype=torch.int64, device="cpu")
        told[0, self._group.rank] = self._steps
        told[1, self._group.rank] = len(self._copied.changed())
        self._group.sum(told, _WHAT)
        steps, written = told
        if bool(written.any()):
            # On no trainer, or the others would take what was written for movement.
            logger.warning(
                "the model was written since the last step on trainers %s: what was "
                "moved since the last average is not averaged",
                written.nonzero().flatten().tolist(),
            )
            return False
        if int(steps.min()) != int(steps.max()):
            raise ConfigMismatchError(
                f"LocalSGD: trainers are after steps {steps.tolist()}, expected equal "
                "numbers. Give every trainer as many batches as the others."
            )
        return True

    @property
    def saving(self) -> Saving:
        """Trainer 0's, of parameters that were just averaged."""
        return self._saving

    def _progress(self) -> dict[str, Any]:
        """Also: how far the interval is, and what outer steps keep."""
        outer = None
        if self._outer is not None:
            outer = {n: kept for one in self._outer for n, kept in one.state().items()}
        return {**super()._progress(), "since": self._since, "outer": outer}

    def _go_on(self, progress: Mapping[str, Any]) -> None:
        """Takes over how far the interval is; another strategy has none."""
        super()._go_on(progress)
        self._since, self._apart = int(progress.get("since", 0)), 0

    def _restore_outer(self, saved: object, plan: Plan) -> list[str]:
        """Takes over what outer steps keep; what could not be, as sentences."""
        found = saved if isinstance(saved, Mapping) else {}
        missing = [
            name for one in self._outer or () for name in one.restore(plan, found)
        ]
        return [
            f"what outer steps keep of {name!r} is not in it and begins anew"
            for name in missing
        ]

    def _begin_anew(self) -> None:
        """Outer steps go on from the values that stand in the model."""
        self._since = self._apart = 0
        for outer in self._outer or ():
            outer.begin()

    def leave(self) -> None:
        """Averages what was moved since the last time; all trainers leave together.

        A mean also with ``outer``, whose interval goes on with the next step. Unless
        some trainer's model was written meanwhile: each keeps its own then.
        """
        self.average_now()
        super().leave()


def _opened(strategy: LocalSGD, opening: Opening) -> CopiedParameters:
    warn_of_sharding(strategy)
    for table in opening.placement.tables:
        where, remedy = of_table(strategy, table)
        raise UnsupportedModelError(
            f"{where}, which averages whole parameters. {remedy}"
        )
    return open_copied(strategy, opening)


register(LocalSGD, opens=_opened, drives=LocalSGDDriver, served=False)
