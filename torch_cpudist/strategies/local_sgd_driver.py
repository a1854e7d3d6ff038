# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""LocalSGD: every trainer steps by itself, and parameters are averaged now and then."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_cpudist.clip import Clip, clip_own
from torch_cpudist.copied_parameters import CopiedParameters
from torch_cpudist.errors import ConfigMismatchError
from torch_cpudist.flat_buckets import DEFAULT_BYTES, Bucket, plan
from torch_cpudist.inner_guard import InnerGuard
from torch_cpudist.log import logger
from torch_cpudist.placement import Rules
from torch_cpudist.state_checks import States
from torch_cpudist.strategies.collective_driver import CollectiveDriver
from torch_cpudist.strategies.driver import whole_samples
from torch_cpudist.strategies.local_sgd import LocalSGD


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
            for i, piece in enumerate(bucket.pieces):
                bucket.view(i).copy_(piece.entry.parameter)
            works.append(self._group.start_sum(bucket.flat))
        for work, bucket in zip(works, self._buckets, strict=True):
            self._group.wait(work, what)
            bucket.flat.mul_(1.0 / n)
            for i, piece in enumerate(bucket.pieces):
                piece.entry.parameter.copy_(bucket.view(i))
        self._copied.accept_changes()

    def leave(self) -> None:
        """Averages what was moved since the last time; all trainers leave together.

        Unless some trainer's model was written meanwhile: each keeps its own then.
        """
        if self._since:
            self._average()
        super().leave()
