# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one driver, whose exchange, leaving and saving are one state
"""Geo: the optimizer runs here; what it moves is exchanged in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_cpudist import _core, ranges
from torch_cpudist.drivers.base import StateKeeper, Wrapped, whole_samples
from torch_cpudist.drivers.exchange_pace import ExchangePace
from torch_cpudist.drivers.geo_rounds_saving import GeoRoundsSaving
from torch_cpudist.drivers.geo_saving import GeoSaving
from torch_cpudist.drivers.registry import Opening, register
from torch_cpudist.drivers.server import ServerDriver, room_check, storing
from torch_cpudist.errors import ConfigurationError
from torch_cpudist.model.clipping import clip_own
from torch_cpudist.model.dense_memory import Weights
from torch_cpudist.model.gradients import hidden_gradients
from torch_cpudist.model.placement import Rules
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import local_state
from torch_cpudist.served.local import LocalParameterSet
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.settings.clip import Clip
from torch_cpudist.strategies.geo import Geo


class LocalState(StateKeeper):
    """State that the trainer keeps of what it steps: all rows, or those it has."""

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
        averages: whether exchanges average movements.
        outer_step: of rows of tables, and of dense parameters, in means of movements;
            ``_core.ROOT_STEP``; 0: they add up.
        steps: since the last exchange began.
        batches: of all replicas, since then.
        servers_lead: a snapshot is being loaded there: what stands here goes.
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
        self.outer_step = _outer_step(strategy, self.averages)
        self._pace = ExchangePace(strategy)
        self._guard = made.guard
        self.steps = 0  # since the last exchange began
        self._samples = 0
        self._exchanging = False
        self._under_way = 0  # steps whose movement that exchange hands on
        self._own_steps = 0
        self._moved = False  # since all movement was handed on
        self._replicas = 1  # whose batches a step is made of
        self.batches = 0  # of all replicas, since the last exchange began
        self.servers_lead = False
        self._all_batches = 0
        self._interval = strategy.interval(0)  # of batches, until the next exchange
        self._run = made.run
        # With an outer optimizer; else an exchange is over at no moment of all.
        self._between: GeoRoundsSaving | None = None
        self._save()

    def _save(self) -> None:
        run, inners = self._run, self._inners
        if self._in_rounds:
            self._between = GeoRoundsSaving(self, self._local, run, inners)
            self.save_by(self._between)
        else:
            self.save_by(GeoSaving(self, self._local, run, inners))

    @property
    def together(self) -> str:
        """It can, if an exchange waits for nobody."""
        if not self._in_rounds:
            return ""
        return (
            "under Geo(outer=...) all trainers meet in every exchange. Start all jobs "
            "again: opt.resume() brings all back to one exchange, that of the newest "
            "snapshot."
        )

    def renew(self) -> None:
        """What was moved here, and not yet handed on, was moved from values of before.

        It goes; the servers' values come in its place. Optimizer state stays.
        """
        self.go_on({})
        self._exchanging = False
        self._pace.note_end(self._interval)
        self._save()

    def handed_on(self) -> int:
        """Those that were made."""
        return self._own_steps

    def end(self, carried_out: Sequence[int]) -> tuple[int, int]:
        """Steps since the last exchange that is known to be over was begun.

        Of the one under way servers may have added some, all or nothing.
        """
        del carried_out
        under_way = self._under_way if self._exchanging else 0
        return self.steps + under_way, under_way

    def progress(self) -> dict[str, int]:
        """Counters, for snapshots."""
        return {"own_steps": self._own_steps, "batches": self._all_batches}

    def go_on(self, progress: Mapping[str, int]) -> None:
        """Takes them over; nothing is moved that the servers have not."""
        self._own_steps = progress.get("own_steps", self._own_steps)
        self._all_batches = progress.get("batches", self._all_batches)
        self.steps = self._samples = self.batches = 0
        self._moved = False
        self._interval = self._strategy.interval(self._all_batches)

    @property
    def exchanging(self) -> bool:
        """Whether an exchange is under way."""
        return self._exchanging

    def since_exchange(self) -> dict[str, int]:
        """Counters since the last one began, and batches until the next; of rounds."""
        return {
            "steps": self.steps,
            "samples": self._samples,
            "batches": self.batches,
            "interval": self._interval,
        }

    def go_on_since(self, counted: Mapping[str, int]) -> None:
        """Takes them over, when what was moved in these steps is here again."""
        self.steps = counted["steps"]
        self._samples = counted["samples"]
        self.batches = counted["batches"]
        self._interval = counted["interval"]
        self._moved = self.steps > 0

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
        self._all_batches += self._replicas
        self._samples += count
        self._own_steps += 1
        self._moved = True
        if local.alone:
            local.exchange.keep_budget()
        else:
            if not local.opened.is_member():
                local.opened.join()
            with ranges.of(ranges.EXCHANGE):
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
        """Where a table is remote; else ``None``, as every row is here."""
        return self._local if self._local.has_remote else None

    @property
    def on_servers(self) -> ParameterSet:
        """All, also where lookups ask nobody."""
        return self._local

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
        self._pace.begin_step()
        due = self.batches >= self._interval
        if self._exchanging or due:
            with Weights(self._local.placement.dense) as weights:
                if self._exchanging and due:
                    self._end_overdue(weights)
                elif self._exchanging:
                    self._advance(weights)
                if due and not self._exchanging and not self._holds_off():
                    self._begin(whole=False)
                    self._advance(weights)
            trained = self._local.trained()
            self._local.note_written([parameter for _, parameter in trained])
        self._pace.end_step()

    def _holds_off(self) -> bool:
        return self._between is not None and self._between.holds_off()

    def _advance(self, weights: Sequence[int]) -> None:
        """Works on the exchange under way for as long as a step is to."""
        exchange, budget_s = self._local.exchange, self._pace.budget_s
        if budget_s is None:
            left = max(self._interval - self.batches, 0)
            # A step of replicas counts several batches.
            calls = [-(-b // self._replicas) for b in (left, self._interval)]
            done = exchange.keep_pace(weights, left=calls[0], interval=calls[1])
        else:
            done = exchange.advance(weights, budget_s)
        self._exchanging = not done

    def _end_overdue(self, weights: Sequence[int]) -> None:
        """Ends the exchange under way, as the next is due; with a budget it may last.

        Nor does it end with an outer optimizer before the other trainers' steps.
        """
        self._pace.note_due()
        self._advance(weights)
        if self._exchanging:
            self._pace.note_late(self._interval)
            if self._pace.budget_s is None and not self._in_rounds:
                self._local.exchange.finish(weights)
                self._exchanging = False
        if not self._exchanging:
            self._pace.note_end(self._interval)

    def _begin(self, whole: bool) -> None:
        # Before it begins: an interrupt must not leave one that is not known of here.
        self._exchanging = True
        self._local.exchange.begin(
            whole=whole,
            step=self.outer_step,
            steps=self.steps,
            samples=self._samples,
        )
        self._under_way = self.steps
        self.steps = self._samples = self.batches = 0
        self._interval = self._strategy.interval(self._all_batches)

    @contextmanager
    def _exchanged(self) -> Iterator[Sequence[int]]:
        """Ends the exchange under way; gives addresses of dense weights for another."""
        local = self._local
        with (
            ranges.of(ranges.EXCHANGE),
            local.written_apart(),
            Weights(local.placement.dense) as weights,
        ):
            local.exchange.finish(weights)
            self._pace.note_end(self._interval)
            yield weights

    def _exchange(self, whole: bool) -> None:
        """Ends the exchange under way and makes another, until nothing is left."""
        if self._between is not None:
            self._exchange_in_rounds(self._between)
            return
        exchange, more = self._local.exchange, True
        with self._exchanged() as weights:
            while more:
                self._begin(whole)
                exchange.finish(weights)
                more = exchange.has_more()
        self._exchanging = False

    def _exchange_in_rounds(self, between: GeoRoundsSaving) -> None:
        """The same of all movement, with a look at snapshots after each exchange."""
        exchange = self._local.exchange
        with self._exchanged():
            self._exchanging = False
        # An outer step that nobody has moved for would be momentum alone.
        more = self.steps > 0
        between.pass_between(more)
        while more:
            with self._exchanged() as weights:
                self._begin(whole=True)
                exchange.finish(weights)
                self._exchanging = False
            more = exchange.has_more()
            between.pass_between(more)

    def hand_on_and(self, do: Callable[[Sequence[int]], None]) -> None:
        """Begins an exchange of all that was moved.

        Args:
            do: called with the addresses of dense weights when it has begun.
        """
        exchange = self._local.exchange
        with self._exchanged() as weights:
            self._begin(whole=True)
            while exchange.has_unsent():
                exchange.finish(weights)
                self._begin(whole=True)
            do(weights)

    # -- leaving, flushing -------------------------------------------------------------

    def settle(self) -> None:
        """Hands on what this trainer moved, and takes in what others did.

        Not with an outer optimizer: that would wait for the other trainers' steps.
        """
        local = self._local
        if local.alone:
            if not self.servers_lead:
                local.store()
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
            self._pace.note_end(self._interval)
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
        local.opened.leave()  # also finishes joining, where an interrupt has left that

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
        return {"exchange": {**self._local.exchange.stats(), **self._pace.stats()}}

    def observed(self) -> dict[str, Any]:
        """The pace alone: exchanges are this thread's, and have no lock."""
        return {"exchange": self._pace.stats()}


def _outer_step(strategy: Geo, averages: bool) -> tuple[float, float]:
    chosen = strategy.outer_step
    if not averages:
        if chosen is not None:
            raise ConfigurationError(
                f"Geo(outer_step={chosen}): movements add up, as SGD's do under "
                "merge_rule='auto'. Set communicator=Communicator(merge_rule='mean') "
                "to step by their mean, or leave outer_step at None."
            )
        return 0.0, 0.0
    if chosen is not None:
        return chosen, chosen
    # All trainers move dense parameters at every step, rows of tables some of them.
    by_rule = strategy.communicator.merge_rule == "mean"
    return (1.0 if by_rule else _core.ROOT_STEP), 1.0


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
        strategy.cache_bytes,
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
