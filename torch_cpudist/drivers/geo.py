# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo: the optimizer runs here; what it moves is exchanged in the background."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_cpudist.drivers.base import StateKeeper, Wrapped, whole_samples
from torch_cpudist.drivers.registry import Opening, register
from torch_cpudist.drivers.server import ServerDriver, room_check, storing
from torch_cpudist.model.clipping import clip_own
from torch_cpudist.model.dense_memory import Weights
from torch_cpudist.model.gradients import hidden_gradients
from torch_cpudist.model.placement import Rules
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import local_state, state_exchange
from torch_cpudist.served.local import LocalParameterSet
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.settings.clip import Clip
from torch_cpudist.strategies.geo import Geo

# How much the last step counts in the measured time of a step.
_NEWEST_SHARE = 0.1


class LocalState(StateKeeper):
    """State that the trainer keeps of parameters whose rows are all here."""

    def __init__(self, made: Wrapped, parameters: LocalParameterSet) -> None:
        """Puts the state from before to where steps look for it."""
        super().__init__(made, parameters)
        self._local = parameters
        local_state.adopt(parameters.tables, made.inners, made.states)

    def held(self) -> Sequence[torch.Tensor]:
        """That of tables."""
        return [one for table in self._local.tables for one in table.tensors]

    def fetch(self) -> list[dict[str, Any]]:
        """Returns this trainer's own state; no messages."""
        return local_state.collect(self._local.tables, self._inners)

    def put(self, states: States) -> None:
        """Takes every trainer's own state; weights as ``store_model``."""
        local_state.put(self._run, self._local, self._inners, states)

    def store_model(self, all_rows: bool) -> None:
        """Sends what was written on trainer 0; state stays."""
        local_state.replace_weights(self._run, self._local, all_rows)

    def give_back(self) -> None:
        """Puts the state of tables where torch has it."""
        local_state.give_back(self._local.tables, self._inners)


class GeoDriver(ServerDriver):
    """Runs the Geo strategy for one parameter set.

    All that is written to the model is written by the training thread: by its
    optimizer, and inside ``step`` by slices of an exchange. A thread of the core only
    sends and receives.

    Attributes:
        averages: by parameter, whether exchanges average it.
        steps: since the last exchange began.
        batches: of all replicas, since then.
    """

    def __init__(
        self, strategy: Geo, parameters: LocalParameterSet, made: Wrapped
    ) -> None:
        """Drives ``parameters``, which are open and have the servers' values."""
        super().__init__(parameters, LocalState(made, parameters))
        self._local = parameters
        self._strategy = strategy
        # With an outer optimizer an exchange ends when every member has begun one.
        self._in_rounds = strategy.outer is not None
        self._inners = made.stepped
        kinds = [table.kind for table in parameters.tables]
        self.averages = strategy.averages(made.stepped, kinds)
        self._guard = made.guard
        self.steps = 0  # since the last exchange began
        self._samples = 0
        self._exchanging = False
        self._own_steps = 0
        self._moved = False  # since all movement was handed on
        self._replicas = 1  # whose batches a step is made of
        self.batches = 0  # of all replicas, since the last exchange began
        self._step_s = 0.0
        self._ended = 0.0

    # -- a step ------------------------------------------------------------------------

    def step(self, rules: Rules, samples: int | None, clip: Clip | None) -> int:
        """Steps the wrapped optimizers, and works on the exchange for a while.

        ``samples`` only counts. Else as ``Driver.step``.

        Returns:
            The steps of all trainers that this one knows of.
        """
        local = self._local
        count = 0 if samples is None else whole_samples(samples)
        # A step without an exchange asks nobody, and a lost server is told at once.
        local.client.check()
        local.check_unchanged()
        clip_own(clip, [parameter for _, parameter in local.trained()])
        weights = [table.placed.found.weight for table in local.tables]
        try:
            local.update_tables(list(rules))
            with self._guard.stepping(), hidden_gradients(weights):
                for inner in self._inners:
                    inner.step()
        finally:
            local.note_written(weights)
            local.accept_changes()
        self.steps += 1
        self.batches += self._replicas
        self._samples += count
        self._own_steps += 1
        self._moved = True
        if not local.alone:
            if not local.opened.is_member():
                local.opened.join()
            self._work_on_exchange()
        return self._known_steps()

    @contextmanager
    def step_of_replicas(self, count: int) -> Iterator[None]:
        """``push_every`` counts the batches of all replicas."""
        self._replicas = count
        try:
            yield
        finally:
            self._replicas = 1

    @property
    def pulled(self) -> ParameterSet | None:
        """``None``: every row is here."""
        return None

    @property
    def served(self) -> list[nn.Parameter]:
        """None: all are updated here."""
        return []

    def global_step(self, rounds: int) -> int:
        """Steps of all trainers, as of the last exchange, and its own since."""
        return self._known_steps()

    def _known_steps(self) -> int:
        if self._local.alone:
            return self._own_steps
        return self._local.exchange.steps() + self.steps

    def _work_on_exchange(self) -> None:
        now = time.perf_counter()
        if self._ended:
            last_s = now - self._ended
            share = _NEWEST_SHARE if self._step_s else 1.0
            self._step_s += share * (last_s - self._step_s)
        due = self.batches >= self._strategy.push_every
        if self._exchanging or due:
            self._advance(self._strategy.exchange_budget * self._step_s, begin=due)
        self._ended = time.perf_counter()

    def _advance(self, budget_s: float, begin: bool) -> None:
        local = self._local
        with Weights(local.placement.dense) as weights:
            if not self._exchanging and begin:
                self._begin(whole=False)
            done = local.exchange.advance(weights, budget_s)
        local.note_written([parameter for _, parameter in local.trained()])
        if done:
            self._exchanging = False

    def _begin(self, whole: bool) -> None:
        # Before it begins: an interrupt must not leave one that is not known of here.
        self._exchanging = True
        self._local.exchange.begin(
            whole=whole,
            averages=self.averages,
            steps=self.steps,
            samples=self._samples,
        )
        self.steps = self._samples = self.batches = 0

    def _exchange(self, whole: bool) -> None:
        """Ends the exchange under way and makes another, until nothing is left."""
        local = self._local
        exchange = local.exchange
        with local.written_apart(), Weights(local.placement.dense) as weights:
            exchange.finish(weights)
            # An outer step that nobody has moved for would be momentum alone.
            more = self.steps > 0 or not self._in_rounds
            while more:
                self._begin(whole)
                exchange.finish(weights)
                more = exchange.has_more()
        self._exchanging = False

    # -- leaving, flushing -------------------------------------------------------------

    def settle(self) -> None:
        """Hands on what this trainer moved, and takes in what others did.

        Not with an outer optimizer: that would wait for the other trainers' steps.
        """
        local = self._local
        if local.alone:
            state_exchange.store(local, {})
        elif self._in_rounds:
            return
        elif local.opened.is_member():
            self._exchange(whole=False)

    def flush(self, pull: str, overwrite: bool = False) -> None:
        """Settles; after ``leave`` also takes the servers' values as they are.

        So it does after a barrier, before the next step, where values travel rounded.

        Args:
            pull: what that is: ``"all"``, ``"dense"`` or ``"none"``. Before ``leave``
                an exchange brings everything that others have changed.
            overwrite: the model was written: it becomes that of the servers, without
                what this trainer moved since its last exchange.
        """
        local = self._local
        if overwrite:
            with local.written_apart(), Weights(local.placement.dense) as weights:
                local.exchange.finish(weights)
            self._exchanging = False
            local.join()
        left = not local.opened.is_member()
        # With nothing of its own on the servers' way it can take their values.
        idle = self._in_rounds and not self._exchanging and not self.steps
        # Others' changes have come rounded, then.
        rounded = local.placement.layout.pull_dtype != "fp32" and not self._moved
        self.settle()
        if local.alone or not (left or idle or rounded):
            return
        if pull != "none":
            local.pull_dense()
        if pull == "all":
            local.pull_tables()
        local.forget_movement()

    def leave(self) -> None:
        """Hands on all of this trainer's movement, and ends its part."""
        local = self._local
        if local.opened.is_member():
            self.before_barrier()
            local.opened.leave()

    def join(self) -> None:
        """Takes part again; what others did meanwhile comes with the next exchange."""
        self._local.opened.join()

    def before_barrier(self) -> None:
        """Hands on all of this trainer's movement: then the servers hold everyone's."""
        local = self._local
        if local.alone:
            self.settle()
        elif local.opened.is_member():
            self._exchange(whole=True)
            self._moved = False

    def stats(self) -> dict[str, Any]:
        """``exchange``: counters and memory of exchanges; see docs/strategies.md."""
        return {"exchange": self._local.exchange.stats()}


def _opened(strategy: Geo, opening: Opening) -> LocalParameterSet:
    run = opening.run
    alone = (
        run.trainer_count == 1
        and run.environment.apart is None
        and strategy.outer is None
    )
    return LocalParameterSet(
        run.trainer_client(),
        opening.placement,
        # The optimizer runs here, and so its state stays here.
        storing(opening, {}),
        opening.states,
        alone,
        run.environment.server.memory_cap_bytes,
        room_check(opening, steps_here=True),
        run.trainer_rank,
    )


def _waits(strategy: Geo) -> str:
    if strategy.outer is None:
        return ""
    return (
        "Geo(outer=...) waits for steps of the other trainers, which another optimizer "
        "on servers would wait for. Train both by one optimizer, or without outer, or "
        "close() the other one first."
    )


register(Geo, opens=_opened, drives=GeoDriver, waits=_waits)
