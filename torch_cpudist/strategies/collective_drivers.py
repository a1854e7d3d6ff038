# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""AllReduce and LocalSGD: trainers step by themselves and average among themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torch_cpudist import local_state
from torch_cpudist.clip import Clip, ClipNorm, ClipValue, clip_own
from torch_cpudist.copied_parameters import CopiedParameters
from torch_cpudist.errors import ConfigMismatchError
from torch_cpudist.flat_buckets import DEFAULT_BYTES, Bucket, plan, squared_norm
from torch_cpudist.gradient_exchange import GradientExchange
from torch_cpudist.gradients import (
    hidden_gradients,
    read_dense_gradient,
    replaced_gradients,
)
from torch_cpudist.inner_guard import InnerGuard
from torch_cpudist.log import logger
from torch_cpudist.placement import Rules
from torch_cpudist.row_exchange import RowExchange, as_gradient, own_rows
from torch_cpudist.state_checks import States
from torch_cpudist.strategies.allreduce import AllReduce
from torch_cpudist.strategies.driver import Driver, whole_samples
from torch_cpudist.strategies.local_sgd import LocalSGD

if TYPE_CHECKING:
    from torch_cpudist.context import Context


class CollectiveDriver(Driver):
    """What strategies have in common whose trainers average among themselves."""

    def __init__(
        self,
        parameters: CopiedParameters,
        guard: InnerGuard,
        states: States,
        others: Sequence[torch.Tensor],
    ) -> None:
        """Drives ``parameters``.

        Args:
            parameters: with trainer 0's values.
            guard: keeps others from stepping the wrapped optimizers.
            states: of their parameters, from before.
            others: parameters of theirs that are not stepped here.
        """
        super().__init__(parameters)
        self._copied = parameters
        self._group = parameters.group
        self._dense = [entry.parameter for entry in parameters.placement.dense]
        self._guard = guard
        self._others = others
        self._steps = 0
        self._averages = 0
        self._said_left = False
        local_state.adopt([], parameters.inners, self._of_placed(states))

    def _of_placed(self, states: States) -> States:
        placed = [entry.parameter for entry in self._copied.entries]
        return {p: states[p] for p in placed if p in states}

    def _gradients(self) -> list[torch.Tensor | None]:
        return [
            None
            if entry.parameter.grad is None
            else read_dense_gradient(entry.name, entry.parameter.grad, entry.dtype)
            for entry in self._copied.placement.dense
        ]

    def _step_inners(self) -> None:
        try:
            with self._guard.stepping(), hidden_gradients(self._others):
                for inner in self._copied.inners:
                    inner.step()
        finally:
            self._copied.accept_changes()

    def _take_part(self) -> None:
        if self._said_left:
            self._group.tell_left("")
            self._said_left = False

    def settle(self) -> None:
        """Values are here when ``step`` returns."""

    def flush(self, pull: str, overwrite: bool = False) -> None:
        """Values are here; what was written to one trainer's copy stays different.

        Raises:
            ModelChangedError: the model was written, and nobody else has its values.
        """
        self._copied.check_unchanged()

    def leave(self) -> None:
        """Tells the others, who cannot go on alone."""
        self._group.tell_left(str(self._group.barriers))
        self._said_left = True

    def join(self) -> None:
        """Takes part again."""
        self._take_part()

    def before_barrier(self) -> None:
        """Tells the others, for the case that they are somewhere else."""
        self.leave()
        self._group.barriers += 1

    def stats(self) -> dict[str, Any]:
        """``collective``: counters; see docs/strategies.md."""
        return {
            "collective": {
                "averages": self._averages,
                "sent_bytes": self._group.sent_bytes,
            }
        }

    # -- optimizer state ---------------------------------------------------------------

    def fetch_state(self, inners: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Returns this trainer's own state; no messages."""
        return local_state.collect([], inners)

    def put_state(
        self, context: Context, inners: Sequence[Optimizer], states: States
    ) -> None:
        """Takes every trainer's own state; weights as ``store_model``."""
        local_state.drop_and_adopt([], inners, self._of_placed(states))
        self.store_model(context, inners, all_rows=False)

    def store_model(
        self, context: Context, inners: Sequence[Optimizer], all_rows: bool
    ) -> None:
        """Makes trainer 0's values everybody's."""
        self._copied.check_kept()
        context.barrier()
        self._copied.broadcast()
        self._copied.check_agreement()

    def give_back_state(self, inners: Sequence[Optimizer]) -> None:
        """State is where torch has it."""


class AllReduceDriver(CollectiveDriver):
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
        super().__init__(parameters, guard, states, others)
        self._exchange = GradientExchange(parameters, strategy.bucket_bytes)
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
        self._copied.check_unchanged()
        self._take_part()
        own = own_rows(self._tables)
        averaged = self._exchange.average(self._gradients(), own, samples)
        self._averages += 1
        if averaged is not None:
            weight = 1 if samples is None else samples
            rows = self._rows.average(own, averaged.counts, weight, averaged.total)
            _clip_average(
                clip,
                [bucket.flat for bucket in self._exchange.buckets]
                + [values.view(-1) for _, values in rows],
            )
            found = self._exchange.averaged(averaged.dense)
            weights = [table.found.weight for table in self._tables]
            for i, (one, table) in enumerate(zip(rows, weights, strict=True)):
                present = i in averaged.tables
                found.append(as_gradient(one, table) if present else None)
            with replaced_gradients([*self._dense, *weights], found):
                self._step_inners()
        self._steps += 1
        return self._steps

    def stats(self) -> dict[str, Any]:
        """Also ``buckets``, and ``repeated``: steps that averaged twice."""
        found = super().stats()
        exchange = self._exchange
        found["collective"]["buckets"] = len(exchange.buckets)
        found["collective"]["repeated"] = exchange.repeated
        return found


def _clip_average(clip: Clip | None, flat: Sequence[torch.Tensor]) -> None:
    """Clips averaged gradients in place, with equal bits on all trainers."""
    if isinstance(clip, ClipNorm):
        norm = math.sqrt(sum(squared_norm(part) for part in flat))
        scale = clip.max_norm / (norm + 1e-6)
        if not scale >= 1.0:
            for part in flat:
                part.mul_(scale)
    elif isinstance(clip, ClipValue):
        for part in flat:
            part.clamp_(-clip.value, clip.value)


class LocalSGDDriver(CollectiveDriver):
    """Runs the LocalSGD strategy."""

    def __init__(
        self,
        parameters: CopiedParameters,
        strategy: LocalSGD,
        guard: InnerGuard,
        states: States,
        others: Sequence[torch.Tensor],
    ) -> None:
        """See ``CollectiveDriver``."""
        super().__init__(parameters, guard, states, others)
        self._strategy = strategy
        self._since = 0  # steps after the last average
        self._buckets: list[Bucket] = plan(parameters.placement.dense, DEFAULT_BYTES)

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
        warm = self._steps <= self._strategy.warmup_steps
        if warm or self._since >= self._strategy.every:
            self._average()
        return self._steps

    @torch.no_grad()
    def _average(self) -> None:
        """Averages parameters. Collective.

        Raises:
            ConfigMismatchError: trainers have taken other numbers of steps.
        """
        what = "averaging parameters"
        if self._group.alone:
            self._since = 0
            self._averages += 1
            return
        n = self._group.size
        told = torch.zeros(2, n, dtype=torch.int64, device="cpu")
        told[0, self._group.rank] = self._steps
        told[1, self._group.rank] = len(self._copied.changed())
        self._group.sum(told, what)
        steps, written = told
        if bool(written.any()):
            # On no trainer, or the others would take what was written for movement.
            logger.warning(
                "the model was written since the last step on trainers %s: what was "
                "moved since the last average is not averaged",
                written.nonzero().flatten().tolist(),
            )
            return
        self._since = 0
        self._averages += 1
        if int(steps.min()) != int(steps.max()):
            raise ConfigMismatchError(
                f"LocalSGD: trainers are after steps {steps.tolist()}, expected equal "
                "numbers. Give every trainer as many batches as the others."
            )
        works = []
        for bucket in self._buckets:
            for i, entry in enumerate(bucket.entries):
                bucket.view(i).copy_(entry.parameter)
            works.append(self._group.start_sum(bucket.flat))
        for work, bucket in zip(works, self._buckets, strict=True):
            self._group.wait(work, what)
            bucket.flat.mul_(1.0 / n)
            for i, entry in enumerate(bucket.entries):
                entry.parameter.copy_(bucket.view(i))
        self._copied.accept_changes()

    def leave(self) -> None:
        """Averages what was moved since the last time; all trainers leave together.

        Unless some trainer's model was written meanwhile: each keeps its own then.
        """
        if self._since:
            self._average()
        super().leave()
