# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What drivers have in common whose trainers average among themselves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from torch_cpudist.collective.copied import CopiedParameters
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.collective.opening import ServerMark
from torch_cpudist.drivers.base import Driver, StateKeeper, Wrapped
from torch_cpudist.drivers.registry import Opening
from torch_cpudist.errors import Error, ModelChangedError
from torch_cpudist.log import logger
from torch_cpudist.model.gradients import hidden_gradients, read_dense_gradient
from torch_cpudist.model.placement import PlacedTable
from torch_cpudist.rules.fused import fused
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import local_state
from torch_cpudist.settings.replicas import Replicas
from torch_cpudist.settings.sharding import Sharding
from torch_cpudist.strategies.base import Strategy


def of_table(strategy: Strategy, table: PlacedTable) -> tuple[str, str]:
    """Which table a refusal is about, and what to do."""
    kind = type(strategy).__name__
    return f"table {table.found.name!r} under {kind}", (
        f"Train tables by servers, the rest as now: Hybrid(dense={kind}(...), "
        "sparse=Sync()), Async() or Geo(). Or set sparse=False on the embedding."
    )


def warn_of_sharding(strategy: Strategy) -> None:
    """Says so where a strategy without blocks is told how to place them."""
    if strategy.sharding != Sharding():
        kind = type(strategy).__name__
        logger.warning("%s: sharding has no effect, no server has a block", kind)


def open_copied(strategy: Strategy, opening: Opening) -> CopiedParameters:
    """Opens a group of all trainers, and takes trainer 0's values."""
    run = opening.run
    client = run.trainer_client()
    # Before a group is made, for which trainers of another strategy do not come.
    mark = None if run.environment.apart else ServerMark(run, opening.name)
    try:
        kind, device = type(strategy).__name__, opening.placement.device
        group = CollectiveGroup(run, kind, device)
        said = repr(dataclasses.replace(strategy, replicas=Replicas()))
        return CopiedParameters(
            client, opening.placement, group, opening.inners, said, mark
        )
    except BaseException:
        if mark is not None:
            with contextlib.suppress(Error):
                mark.close(tell_servers=True)
        raise


class CopiedState(StateKeeper):
    """State where torch has it, on every trainer."""

    def __init__(self, made: Wrapped, parameters: CopiedParameters) -> None:
        """Puts the state from before to where steps look for it."""
        super().__init__(made, parameters)
        self._copied = parameters
        local_state.adopt([], made.inners, self._of_placed(made.states))

    def _of_placed(self, states: States) -> States:
        placed = [entry.parameter for entry in self._copied.entries]
        return {p: states[p] for p in placed if p in states}

    def fetch(self) -> list[dict[str, Any]]:
        """Returns this trainer's own state; no messages."""
        return local_state.collect([], self._inners)

    def put(self, states: States) -> None:
        """Takes every trainer's own state; weights as ``store_model``."""
        local_state.drop_and_adopt([], self._inners, self._of_placed(states))
        self.store_model(all_rows=False)

    def store_model(self, all_rows: bool) -> None:
        """Makes trainer 0's values everybody's."""
        self._copied.check_kept()
        self._run.barrier()
        self._copied.broadcast()
        self._copied.check_agreement()

    def give_back(self) -> None:
        """State is where torch has it."""


class CollectiveDriver(Driver):
    """What strategies have in common whose trainers average among themselves."""

    def __init__(
        self, parameters: CopiedParameters, made: Wrapped, keeper: CopiedState
    ) -> None:
        """Drives ``parameters``, which have trainer 0's values."""
        self.keeper = keeper
        self._copied = parameters
        self._group = parameters.group
        self._dense = [entry.parameter for entry in parameters.placement.dense]
        self._guard = made.guard
        self._others = made.others
        self._steps = 0
        self._averages = 0
        self._said_left = False

    def _gradients(self) -> list[torch.Tensor | None]:
        return [
            None
            if entry.parameter.grad is None
            else read_dense_gradient(entry.name, entry.parameter.grad, entry.dtype)
            for entry in self._copied.placement.dense
        ]

    def _step_inners(self) -> None:
        try:
            hidden = hidden_gradients(self._others)
            with self._guard.stepping(), hidden, fused(self._copied.inners):
                for inner in self._copied.inners:
                    inner.step()
        finally:
            self._copied.accept_changes()

    def _take_part(self) -> None:
        if self._said_left:
            self._group.tell_left("")
            self._said_left = False

    def _progress(self) -> dict[str, Any]:
        """Counters, for snapshots."""
        return {"steps": self._steps, "averages": self._averages}

    def _go_on(self, progress: Mapping[str, Any]) -> None:
        """Takes counters over from a snapshot."""
        self._steps = int(progress["steps"])
        self._averages = int(progress["averages"])

    def settle(self) -> None:
        """Values are here when ``step`` returns."""

    def check_overwrite(self) -> None:
        """Refuses to drop what was written: nobody else keeps this trainer's values.

        Raises:
            ModelChangedError: the model was written.
        """
        if names := self._copied.changed():
            raise ModelChangedError(
                f"flush(overwrite=True): {len(names)} parameters that trainers average "
                f"among themselves were written (first: {names[0]!r}), and no server "
                "has their values to go back to. All is as before. Write the earlier "
                "values back, or call opt.store_model() on every trainer, which makes "
                "trainer 0's everybody's."
            )

    def flush(self, pull: str, overwrite: bool = False) -> None:
        """Values are here; see ``check_overwrite``."""
        self.check_overwrite()

    def leave(self) -> None:
        """Tells the others, who cannot go on alone."""
        self._group.tell_left("has left")
        self._said_left = True

    def join(self) -> None:
        """Takes part again."""
        self._take_part()

    def before_barrier(self) -> None:
        """Tells the others, for the case that they are somewhere else."""
        self.leave()
        self._group.barriers += 1

    def waited_s(self) -> float:
        """In collectives."""
        return self._group.wait_s

    def stats(self) -> dict[str, Any]:
        """``collective``: counters; see docs/strategies.md."""
        return {
            "collective": {
                "averages": self._averages,
                "sent_bytes": self._group.sent_bytes,
                "wait_s": self._group.wait_s,
            }
        }
