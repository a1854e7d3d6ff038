# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid: one driver for tables, another for dense parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_cpudist.drivers.base import Driver, StateKeeper, Wrapped, whole_samples
from torch_cpudist.drivers.copied_saving import CopiedSaving
from torch_cpudist.drivers.fetched_saving import FetchedSaving
from torch_cpudist.drivers.hybrid_parameters import ComposedParameters
from torch_cpudist.drivers.hybrid_saving import HybridSaving
from torch_cpudist.drivers.registry import Opening, engine_of, register
from torch_cpudist.drivers.saving import Saving
from torch_cpudist.drivers.served_saving import ServedSaving
from torch_cpudist.errors import (
    Error,
    InternalError,
    SnapshotError,
    UnsupportedModelError,
)
from torch_cpudist.model.gradients import read_dense_gradient
from torch_cpudist.model.parts import dense_of, dense_rules, table_rules, tables_of
from torch_cpudist.model.placement import Placement, Rules
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.served.state_exchange import indexed_parameters
from torch_cpudist.settings.clip import Clip
from torch_cpudist.strategies.base import Strategy
from torch_cpudist.strategies.hybrid import Hybrid


class HybridState(StateKeeper):
    """State of two parts, each where its strategy keeps it."""

    def __init__(
        self,
        made: Wrapped,
        parameters: ComposedParameters,
        sparse: StateKeeper,
        dense: StateKeeper,
    ) -> None:
        """Composes keepers of the two parts of ``parameters``."""
        super().__init__(made, parameters)
        self._sparse = sparse
        self._dense = dense

    def fetch(self) -> list[dict[str, Any]]:
        """Returns state of each parameter from where it is kept."""
        tables = {id(table.found.weight) for table in self._trained.placement.tables}
        merged = []
        pairs = zip(
            self._inners, self._sparse.fetch(), self._dense.fetch(), strict=True
        )
        for inner, sparse, dense in pairs:
            state = {}
            for i, parameter in enumerate(indexed_parameters(inner)):
                kept = sparse if id(parameter) in tables else dense
                if i in kept["state"]:
                    state[i] = kept["state"][i]
            merged.append({"state": state, "param_groups": dense["param_groups"]})
        return merged

    def put(self, states: States) -> None:
        """Takes checked state to both parts."""
        self._sparse.put(states)
        self._dense.put(states)

    def store_model(self, all_rows: bool) -> None:
        """Sends what was written, of both parts."""
        self._sparse.store_model(all_rows)
        self._dense.store_model(all_rows)

    def give_back(self) -> None:
        """The end, of both parts."""
        self._sparse.give_back()
        self._dense.give_back()

    def held(self) -> Sequence[torch.Tensor]:
        """That of both parts."""
        return [*self._sparse.held(), *self._dense.held()]


class HybridDriver(Driver):
    """Runs two strategies, each for its part of the parameters."""

    def __init__(
        self,
        parameters: ComposedParameters,
        made: Wrapped,
        sparse: Driver,
        dense: Driver,
    ) -> None:
        """Composes drivers of the two parts of ``parameters``."""
        self.keeper = HybridState(made, parameters, sparse.keeper, dense.keeper)
        self._trained = parameters
        self._dense_parameters = parameters.dense
        self._run = made.run
        self._placement = parameters.placement
        self.sparse = sparse
        self.dense = dense
        # Tables first: where both wait for others, all trainers do so in one order.
        self._both = (sparse, dense)
        self._saving: HybridSaving | None = None

    def step(self, rules: Rules, samples: int | None, clip: Clip | None) -> int:
        """Steps both parts; pushes of tables travel while dense ones are averaged."""
        if samples is not None:
            whole_samples(samples)
        # What one part refuses is refused before the other has sent anything.
        self._trained.check_unchanged()
        for entry in self._placement.dense:
            if entry.parameter.grad is not None:
                read_dense_gradient(entry.name, entry.parameter.grad, entry.dtype)
        if self._saving is not None and self._saving.holds_step():
            self.sparse.settle()
        if not self._trained.bounded:  # else the step is refused
            self._join_both()
        self.sparse.step(table_rules(self._placement, rules), samples, clip)
        return self.dense.step(dense_rules(self._placement, rules), samples, clip)

    @contextmanager
    def step_of_replicas(self, count: int) -> Iterator[None]:
        """Of both parts."""
        with ExitStack() as entered:
            for part in self._both:
                entered.enter_context(part.step_of_replicas(count))
            yield

    def global_step(self, rounds: int) -> int:
        """As the dense part counts."""
        return self.dense.global_step(rounds)

    @property
    def pulled(self) -> ParameterSet | None:
        """That of the tables."""
        return self.sparse.pulled

    @property
    def saving(self) -> Saving:
        """Of both parts.

        Raises:
            SnapshotError: no step is a moment of both.
        """
        if self._saving is None:
            tables = self.sparse.saving
            if tables.at_barrier:
                raise SnapshotError(
                    "Hybrid(sparse=Geo(outer=...)) has no snapshots: tables have a "
                    "moment between two exchanges, dense parameters after a step of "
                    "all trainers. Nothing was changed. Use Geo without outer in it, "
                    "Geo(outer=...) of all parameters, or save model.state_dict() "
                    "after opt.flush()."
                )
            self._saving = HybridSaving(tables, self._dense_saving())
        return self._saving

    def _dense_saving(self) -> CopiedSaving | FetchedSaving:
        dense, parameters = self.dense.saving, self._dense_parameters
        if isinstance(dense, CopiedSaving):
            return dense
        if not (
            isinstance(dense, ServedSaving) and isinstance(parameters, ParameterSet)
        ):
            raise InternalError(f"{type(dense).__name__} saves no part of Hybrid")
        return FetchedSaving(dense, parameters, self._run)

    @property
    def served(self) -> list[nn.Parameter]:
        """Those of both parts."""
        return [parameter for part in self._both for parameter in part.served]

    @property
    def in_rounds(self) -> bool:
        """As soon as one part's do."""
        return any(part.in_rounds for part in self._both)

    @property
    def is_away(self) -> bool:
        """As soon as it has left one part's."""
        return any(part.is_away for part in self._both)

    def settle(self) -> None:
        """Settles both parts."""
        for part in self._both:
            part.settle()

    def check_overwrite(self) -> None:
        """Refuses what either part would refuse."""
        for part in self._both:
            part.check_overwrite()

    def flush(self, pull: str, overwrite: bool = False) -> None:
        """Flushes both parts, or none."""
        if overwrite:
            self.check_overwrite()
        for part in self._both:
            part.flush(pull, overwrite)

    def leave(self) -> None:
        """Ends this trainer's part in both."""
        for part in self._both:
            part.leave()

    def join(self) -> None:
        """Takes part again in both, from one step of all others on.

        With a bound on staleness; else the next step does, and this takes dense values.
        """
        if self._trained.bounded:
            self._join_both()
        for part in self._both:
            part.join()

    def _join_both(self) -> None:
        """Joins both parts at once if servers keep both and this trainer has left.

        One after the other they could take it in at two steps, and each would wait for
        trainers that wait in the other one.
        """
        kept = self._dense_parameters
        if not isinstance(kept, ParameterSet):
            return
        dense, tables = kept.opened, self._trained.tables.opened
        if dense.is_member():
            if self._trained.bounded or tables.is_member():
                return
            dense.leave()  # an interrupt has come between the two
        if not tables.is_member():
            tables.join_with(dense)

    def before_barrier(self) -> None:
        """Hands on what both parts must."""
        for part in self._both:
            part.before_barrier()

    def stats(self) -> dict[str, Any]:
        """Counters of both parts."""
        return {**self.sparse.stats(), **self.dense.stats()}

    def waited_s(self) -> float:
        """Of both parts."""
        return sum(part.waited_s() for part in self._both)

    def observed(self) -> dict[str, Any]:
        """Of both parts."""
        return {**self.sparse.observed(), **self.dense.observed()}

    def no_sync(self) -> AbstractContextManager[None]:
        """As the dense part does."""
        return self.dense.no_sync()


def _opened(strategy: Hybrid, opening: Opening) -> ComposedParameters:
    placement, trainers = opening.placement, opening.run.trainers()
    _check_parts(placement)
    tables = tables_of(placement, strategy.sparse.updates(trainers))
    dense = dense_of(placement, strategy.dense.updates(trainers))
    part = strategy.dense_part
    opened = engine_of(strategy.sparse).opens(
        strategy.sparse, replace(opening, placement=tables)
    )
    try:
        if not isinstance(opened, ParameterSet):
            raise InternalError(f"{strategy.sparse} keeps no tables on servers")
        rest = engine_of(part).opens(part, replace(opening, placement=dense))
        return ComposedParameters(placement, opened, rest)
    except BaseException:
        # The model keeps none of this.
        with contextlib.suppress(Error):
            opened.close(tell_servers=True)
        raise


def _check_parts(placement: Placement) -> None:
    if not placement.tables:
        raise UnsupportedModelError(
            "Hybrid trains tables and dense parameters, found no table: no "
            "nn.Embedding or nn.EmbeddingBag with sparse=True (cpudist.shard_tables "
            "sets it). Use the dense part's strategy alone."
        )
    if not placement.dense:
        raise UnsupportedModelError(
            "Hybrid trains tables and dense parameters, found tables only. Use the "
            "sparse part's strategy alone."
        )


def _driven(
    strategy: Hybrid, parameters: ComposedParameters, made: Wrapped
) -> HybridDriver:
    weights = [table.found.weight for table in parameters.placement.tables]
    part = strategy.dense_part
    # Tables are stepped without torch's optimizers, and have their state already.
    tables = replace(made, stepped=(), states={})
    dense = replace(made, others=weights)
    return HybridDriver(
        parameters,
        made,
        engine_of(strategy.sparse).drives(strategy.sparse, parameters.tables, tables),
        engine_of(part).drives(part, parameters.dense, dense),
    )


def _parts(strategy: Hybrid) -> tuple[Strategy, Strategy]:
    return strategy.dense, strategy.sparse


def _waits(strategy: Hybrid) -> str:
    return engine_of(strategy.sparse).waits(strategy.sparse)


register(Hybrid, opens=_opened, drives=_driven, parts=_parts, waits=_waits)
