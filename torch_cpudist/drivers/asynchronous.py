# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Async: a step queues its gradients; servers apply them as they come."""

from __future__ import annotations

from collections.abc import Sequence

from torch_cpudist import _core, ranges
from torch_cpudist.drivers.base import Wrapped, served_rules, whole_samples
from torch_cpudist.drivers.queued_saving import QueuedSaving
from torch_cpudist.drivers.registry import register
from torch_cpudist.drivers.server import ServedState, ServerDriver, open_set
from torch_cpudist.model.placement import Rules
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.settings.clip import Clip
from torch_cpudist.strategies.asynchronous import Async

_ADD_UP = ("sgd",)


def _merged_by_mean(rule: str, configs: list[_core.OptimizerConfig]) -> list[bool]:
    if rule == "auto":
        return [config.kind not in _ADD_UP for config in configs]
    return [rule == "mean"] * len(configs)


class AsyncDriver(ServerDriver):
    """Runs the Async strategy for one parameter set.

    The training thread packs gradients into a queue; a thread of the core merges and
    sends what waits, and keeps the dense values that come back. The training thread
    writes them to the model at its next step: nobody else touches the weights.
    """

    def __init__(
        self, strategy: Async, parameters: ParameterSet, made: Wrapped
    ) -> None:
        """Starts the queue of ``parameters``."""
        super().__init__(parameters, ServedState(made, parameters))
        self._strategy = strategy
        self._run = made.run
        self._start()

    def _start(self) -> None:
        parameters, settings = self._parameters, self._strategy.communicator
        configs = parameters.placement.layout.configs
        self._pushes = parameters.opened.start_queue(
            size=settings.send_queue_size,
            max_merge=self._strategy.max_merge,
            mean=_merged_by_mean(settings.merge_rule, configs),
            pull_every=settings.pull_every,
        )
        self.save_by(QueuedSaving(parameters, self._run, self._pushes))

    @property
    def together(self) -> str:
        """It can: nobody waits for anybody's steps."""
        return ""

    def renew(self) -> None:
        """What was queued for the servers that were lost is lost with them."""
        self._start()

    def handed_on(self) -> int:
        """Those that were queued."""
        return self._pushes.added()

    def end(self, carried_out: Sequence[int]) -> tuple[int, int]:
        """Exact: each server has told what it has applied."""
        return self._pushes.end(carried_out)

    def step(
        self,
        rules: Rules,
        samples: int | None,
        clip: Clip | None,
    ) -> int:
        """Queues a copy of the gradients, and takes dense values in that have come.

        ``samples`` only counts. Else as ``Driver.step``.

        Raises:
            Error: what an earlier push failed with.
        """
        count = 0 if samples is None else whole_samples(samples)
        return self._parameters.send(
            self._pushes.enqueue, served_rules(rules), clip, samples=count
        )

    def global_step(self, rounds: int) -> int:
        """Steps of all trainers, each of a merged push too, and those still queued."""
        return self._pushes.known_steps()

    def settle(self) -> None:
        """Waits until every queued push is applied."""
        with ranges.of(ranges.WAIT):
            self._parameters.opened.drain()


register(Async, opens=open_set, drives=AsyncDriver)
