# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid: one driver for tables, another for dense parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist.drivers.base import Driver, whole_samples
from torch_cpudist.drivers.hybrid_parameters import ComposedParameters
from torch_cpudist.model.gradients import read_dense_gradient
from torch_cpudist.model.parts import dense_rules, table_rules
from torch_cpudist.model.placement import Rules
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.served.state_exchange import indexed_parameters
from torch_cpudist.settings.clip import Clip

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run


class HybridDriver(Driver):
    """Runs two strategies, each for its part of the parameters."""

    def __init__(
        self, parameters: ComposedParameters, sparse: Driver, dense: Driver
    ) -> None:
        """Composes drivers of the two parts of ``parameters``."""
        super().__init__(parameters)
        self._placement = parameters.placement
        self._sparse = sparse
        self._dense = dense
        # Tables first: where both wait for others, all trainers do so in one order.
        self._both = (sparse, dense)

    def step(self, rules: Rules, samples: int | None, clip: Clip | None) -> int:
        """Steps both parts; pushes of tables travel while dense ones are averaged."""
        if samples is not None:
            whole_samples(samples)
        # What one part refuses is refused before the other has sent anything.
        self._trained.check_unchanged()
        for entry in self._placement.dense:
            if entry.parameter.grad is not None:
                read_dense_gradient(entry.name, entry.parameter.grad, entry.dtype)
        self._sparse.step(table_rules(self._placement, rules), samples, clip)
        return self._dense.step(dense_rules(self._placement, rules), samples, clip)

    def held_state(self) -> Sequence[torch.Tensor]:
        """That of both parts."""
        return [one for part in self._both for one in part.held_state()]

    @contextmanager
    def step_of_replicas(self, count: int) -> Iterator[None]:
        """Of both parts."""
        with ExitStack() as entered:
            for part in self._both:
                entered.enter_context(part.step_of_replicas(count))
            yield

    def global_step(self, rounds: int) -> int:
        """As the dense part counts."""
        return self._dense.global_step(rounds)

    @property
    def pulled(self) -> ParameterSet | None:
        """That of the tables."""
        return self._sparse.pulled

    @property
    def served(self) -> list[nn.Parameter]:
        """Those of both parts."""
        return [parameter for part in self._both for parameter in part.served]

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
        """Takes part again in both."""
        for part in self._both:
            part.join()

    def before_barrier(self) -> None:
        """Hands on what both parts must."""
        for part in self._both:
            part.before_barrier()

    def stats(self) -> dict[str, Any]:
        """Counters of both parts."""
        return {**self._sparse.stats(), **self._dense.stats()}

    def no_sync(self) -> AbstractContextManager[None]:
        """As the dense part does."""
        return self._dense.no_sync()

    # -- optimizer state ---------------------------------------------------------------

    def fetch_state(self, inners: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Returns state of each parameter from where it is kept."""
        tables = {id(table.found.weight) for table in self._placement.tables}
        merged = []
        pairs = zip(
            inners,
            self._sparse.fetch_state(inners),
            self._dense.fetch_state(inners),
            strict=True,
        )
        for inner, sparse, dense in pairs:
            state = {}
            for i, parameter in enumerate(indexed_parameters(inner)):
                kept = sparse if id(parameter) in tables else dense
                if i in kept["state"]:
                    state[i] = kept["state"][i]
            merged.append({"state": state, "param_groups": dense["param_groups"]})
        return merged

    def put_state(self, run: Run, inners: Sequence[Optimizer], states: States) -> None:
        """Takes checked state to both parts."""
        for part in self._both:
            part.put_state(run, inners, states)

    def store_model(
        self, run: Run, inners: Sequence[Optimizer], all_rows: bool
    ) -> None:
        """Sends what was written, of both parts."""
        for part in self._both:
            part.store_model(run, inners, all_rows)

    def give_back_state(self, inners: Sequence[Optimizer]) -> None:
        """The end, of both parts."""
        for part in self._both:
            part.give_back_state(inners)
