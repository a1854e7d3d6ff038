# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What runs a strategy: when to push, pull and wait."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist import _core
from torch_cpudist.drivers.guard import InnerGuard
from torch_cpudist.drivers.saving import Saving, no_snapshots
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.model.placement import Rules
from torch_cpudist.rules.state_parts import States
from torch_cpudist.served import state_exchange
from torch_cpudist.served.base import Trained
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.settings.clip import Clip

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

# Weights travel as float64, which holds whole numbers up to here exactly.
_MAX_SAMPLES = 2**53


def served_rules(rules: Rules) -> list[_core.OptimizerConfig]:
    """The rules of a strategy whose servers run them: all are known."""
    return [rule for rule in rules if rule is not None]


def whole_samples(samples: int) -> int:
    """Checks a number of samples.

    Raises:
        InvalidArgumentError: it is no whole number, or out of range.
    """
    try:
        count = operator.index(samples)
    except TypeError:
        raise InvalidArgumentError(
            f"step: samples must be a whole number, found {type(samples).__name__} "
            f"{samples!r}. Pass the batch's number of samples."
        ) from None
    if not 0 <= count <= _MAX_SAMPLES:
        raise InvalidArgumentError(
            f"step: samples must be >= 0 and at most 2**53, got {count}"
        )
    return count


@dataclass(frozen=True)
class Wrapped:
    """What a driver works with, beside its strategy and its parameters.

    Attributes:
        run: this trainer's.
        inners: the wrapped optimizers.
        guard: keeps others from stepping them.
        states: of their parameters, from before.
        stepped: those of them that the driver steps.
        others: parameters of theirs that another driver steps.
    """

    run: Run
    inners: Sequence[Optimizer]
    guard: InnerGuard
    states: States
    stepped: Sequence[Optimizer]
    others: Sequence[torch.Tensor] = ()


class StateKeeper(ABC):
    """Knows where the optimizer state of a driver's parameters is. Not thread-safe."""

    def __init__(self, made: Wrapped, trained: Trained) -> None:
        """Keeps the state of ``trained``."""
        self._run = made.run
        self._inners = made.inners
        self._trained = trained

    @abstractmethod
    def fetch(self) -> list[dict[str, Any]]:
        """Returns a ``state_dict`` for each wrapped optimizer."""

    def load(self, state_dict: Any) -> None:
        """Loads a ``state_dict``; see ``DistributedOptimizer.load_state_dict``."""
        states = state_exchange.loaded_states(
            self._run, self._trained, self._inners, state_dict
        )
        self.put(states)

    @abstractmethod
    def put(self, states: States) -> None:
        """Takes checked state, and trainer 0's weights, to where they are kept."""

    @abstractmethod
    def store_model(self, all_rows: bool) -> None:
        """Sends what was written; see ``DistributedOptimizer.store_model``."""

    @abstractmethod
    def give_back(self) -> None:
        """The end: leaves what state the trainer has with the wrapped optimizers."""

    def held(self) -> Sequence[torch.Tensor]:
        """State that is here, but not in the wrapped optimizers."""
        return ()


class Driver(ABC):
    """Runs a strategy for what one optimizer trains, or a part. Not thread-safe.

    Attributes:
        keeper: of the optimizer state.
    """

    keeper: StateKeeper

    @property
    def together(self) -> str:
        """Why it cannot outlive its servers; empty if it can.

        By default trainers and servers hold one model between them.
        """
        return (
            "trainers of this strategy step together with their servers. Start all "
            "jobs again: opt.resume() brings all back to one moment, the newest "
            "snapshot, exactly."
        )

    def renew(self) -> None:  # noqa: B027 - most end with their servers
        """Its parameters are open on servers that have come back, and have values."""

    def handed_on(self) -> int:
        """Steps that are on their way to servers or there, since these are open."""
        return 0

    def end(self, carried_out: Sequence[int]) -> tuple[int, int]:
        """Ends what is on its way to servers that have counted this trainer as lost.

        Args:
            carried_out: per server, the last request that was.

        Returns:
            Of the last steps that were handed on, how many not all servers have
            applied, and how many of these some have.
        """
        del carried_out
        return 0, 0

    @abstractmethod
    def step(
        self,
        rules: Rules,
        samples: int | None,
        clip: Clip | None,
    ) -> int:
        """Hands this trainer's gradients on.

        Args:
            rules: of this step, one per group.
            samples: samples behind the gradients.
            clip: how they are clipped.

        Returns:
            The number of updates behind the dense values that the model has now.

        Raises:
            InvalidArgumentError: ``samples`` is no whole number or out of range;
                nothing was sent.
        """

    @property
    def in_rounds(self) -> bool:
        """Whether the n-th steps of trainers meet in a round; by default not."""
        return False

    @property
    def is_away(self) -> bool:
        """Whether this trainer has left rounds that its next step joins again."""
        return False

    def global_step(self, rounds: int) -> int:
        """The cluster's count of steps; see ``cpudist.global_step``.

        Args:
            rounds: what ``step`` has returned last. By default a step is a round.
        """
        return rounds

    @abstractmethod
    def settle(self) -> None:
        """Returns when every gradient handed on is applied."""

    @abstractmethod
    def flush(self, pull: str, overwrite: bool = False) -> None:
        """Settles and refreshes local copies.

        Args:
            pull: ``"all"``, ``"dense"`` or ``"none"``.
            overwrite: the model was written since the last step, to be dropped.
        """

    def check_overwrite(self) -> None:  # noqa: B027 - most have values to go back to
        """Refuses, before anything is done, a ``flush`` that drops what was written.

        Raises:
            ModelChangedError: nobody has the values from before.
        """

    @abstractmethod
    def leave(self) -> None:
        """Ends this trainer's part, once what was handed on is applied."""

    @abstractmethod
    def join(self) -> None:
        """Takes part again, before the next forward."""

    def before_barrier(self) -> None:
        """Hands on what is to be elsewhere when everybody has left."""
        self.settle()

    def stats(self) -> dict[str, Any]:
        """Counters of this strategy, beside those of the client."""
        return {}

    def observed(self) -> dict[str, Any]:
        """What ``stats`` says that any thread may read while another one trains."""
        return self.stats()

    def waited_s(self) -> float:
        """Seconds blocked beside those that the client counts; from any thread."""
        return 0.0

    def step_of_replicas(self, count: int) -> AbstractContextManager[None]:
        """While it is entered, a step is one batch of each of ``count`` replicas."""
        return nullcontext()

    @property
    def pulled(self) -> ParameterSet | None:
        """The parameter set whose rows lookups pull; ``None`` where all are here."""
        return None

    @property
    def on_servers(self) -> ParameterSet | None:
        """What is opened anew on servers that have come back; by default ``pulled``."""
        return self.pulled

    @property
    def served(self) -> list[nn.Parameter]:
        """Parameters that servers update, with state of their own; by default none."""
        return []

    @property
    def saving(self) -> Saving:
        """What it does for snapshots; by default nothing.

        Raises:
            SnapshotError: the strategy has none.
        """
        raise no_snapshots(type(self).__name__.removesuffix("Driver"))

    def no_sync(self) -> AbstractContextManager[None]:
        """While it is entered, backward sends nothing; by default it never does."""
        return nullcontext()
