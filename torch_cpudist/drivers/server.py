# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What strategies have in common whose parameters are on servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from torch_cpudist.drivers.base import Driver, StateKeeper, Wrapped
from torch_cpudist.drivers.registry import Opening
from torch_cpudist.drivers.saving import Saving
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import state_exchange
from torch_cpudist.served.room import RoomCheck
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.strategies.base import Strategy


def storing(opening: Opening, states: States) -> Callable[[ParameterSet], None] | None:
    """What sends the initial values with ``states``; on trainer 0 only."""
    if opening.run.trainer_rank > 0:
        return None
    return functools.partial(state_exchange.store, states=states)


def room_check(opening: Opening, steps_here: bool) -> Callable[[], None]:
    """What asks all ranks whether tables have room; looks at this one now."""
    run, name = opening.run, opening.name
    return RoomCheck(run, name, opening.placement, steps_here).compare


def open_set(strategy: Strategy, opening: Opening) -> ParameterSet:
    """Opens a parameter set whose optimizer runs on the servers, with its state."""
    client = opening.run.trainer_client()
    return ParameterSet(
        client,
        opening.placement,
        storing(opening, opening.states),
        room_check(opening, steps_here=False),
        opening.run.trainer_rank,
    )


class ServedState(StateKeeper):
    """State that the servers keep."""

    def __init__(self, made: Wrapped, parameters: ParameterSet) -> None:
        """That of ``parameters``."""
        super().__init__(made, parameters)
        self._parameters = parameters

    def fetch(self) -> list[dict[str, Any]]:
        """Pulls the servers' state."""
        return state_exchange.fetch(self._parameters, self._inners)

    def put(self, states: States) -> None:
        """Sends trainer 0's state and weights."""
        state_exchange.put(self._run, self._parameters, states)

    def store_model(self, all_rows: bool) -> None:
        """Sends trainer 0's weights, keeping state."""
        state_exchange.replace_weights(
            self._run, self._parameters, self._inners, all_rows
        )

    def give_back(self) -> None:
        """Remembers that state stays behind."""
        state_exchange.note_lost(self._parameters, self._inners)


class ServerDriver(Driver):
    """Runs a strategy for one parameter set of the servers."""

    def __init__(self, parameters: ParameterSet, keeper: StateKeeper) -> None:
        """Drives ``parameters``, whose state ``keeper`` has."""
        self._parameters = parameters
        self.keeper = keeper
        self._saving: Saving | None = None

    @property
    def saving(self) -> Saving:
        """The servers', where the strategy has snapshots."""
        return super().saving if self._saving is None else self._saving

    def save_by(self, saving: Saving) -> None:
        """Has its snapshots saved so."""
        self._saving = saving

    def flush(self, pull: str, overwrite: bool = False) -> None:
        """Settles and pulls; see ``Driver.flush``."""
        self.settle()
        if pull != "none":
            self._parameters.pull_dense()
        if pull == "all":
            self._parameters.pull_tables()

    @property
    def pulled(self) -> ParameterSet | None:
        """What the servers hold: lookups pull its rows."""
        return self._parameters

    @property
    def served(self) -> list[nn.Parameter]:
        """All that the servers hold."""
        return [parameter for _, parameter in self._parameters.trained()]

    def leave(self) -> None:
        """Ends this trainer's part, once what was handed on is applied."""
        self._parameters.opened.leave()

    def join(self) -> None:
        """Takes part again, before the next forward."""
        self._parameters.join()
