# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What runs a strategy for one parameter set: when to push, pull and wait."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist import _core, state_exchange
from torch_cpudist.clip import Clip
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.parameter_set import ParameterSet
from torch_cpudist.placement import Rules

if TYPE_CHECKING:
    from torch_cpudist.context import Context

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
            "step: samples must be a whole number, found "
            f"{type(samples).__name__} {samples!r}. Pass the batch's number of samples."
        ) from None
    if not 0 <= count <= _MAX_SAMPLES:
        raise InvalidArgumentError(
            f"step: samples must be >= 0 and at most 2**53, got {count}"
        )
    return count


class Driver(ABC):
    """Runs a strategy for one parameter set. Not thread-safe."""

    def __init__(self, parameters: ParameterSet) -> None:
        """Drives ``parameters``."""
        self._parameters = parameters

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

    @abstractmethod
    def settle(self) -> None:
        """Returns when every gradient handed on is applied."""

    def flush(self, pull: str, overwrite: bool = False) -> None:
        """Settles and refreshes local copies.

        Args:
            pull: ``"all"``, ``"dense"`` or ``"none"``.
            overwrite: the model was written since the last step, to be dropped.
        """
        self.settle()
        if pull != "none":
            self._parameters.pull_dense()
        if pull == "all":
            self._parameters.pull_tables()

    def prefetch(self, ids: Mapping[nn.Module, torch.Tensor], managed: bool) -> int:
        """Asks for rows of a batch to come; see ``ParameterSet.prefetch``."""
        return self._parameters.prefetch(ids, managed)

    def leave(self) -> None:
        """Ends this trainer's part, once what was handed on is applied."""
        self._parameters.client.leave(self._parameters.id)

    def join(self) -> None:
        """Takes part again, before the next forward."""
        self._parameters.join()

    def before_barrier(self) -> None:
        """Hands on what is to be on the servers when everybody has left."""
        self.settle()

    def stats(self) -> dict[str, Any]:
        """Counters of this strategy, beside those of the client."""
        return {}

    # -- optimizer state ---------------------------------------------------------------

    def fetch_state(self, inners: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Returns a ``state_dict`` for each wrapped optimizer."""
        return state_exchange.fetch(self._parameters, inners)

    def load_state(
        self, context: Context, inners: Sequence[Optimizer], state_dict: Any
    ) -> None:
        """Loads a ``state_dict``; see ``DistributedOptimizer.load_state_dict``."""
        state_exchange.replace_state(context, self._parameters, inners, state_dict)

    def store_model(
        self, context: Context, inners: Sequence[Optimizer], all_rows: bool
    ) -> None:
        """Sends what was written; see ``DistributedOptimizer.store_model``."""
        state_exchange.replace_weights(context, self._parameters, inners, all_rows)

    def give_back_state(self, inners: Sequence[Optimizer]) -> None:
        """The end: leaves what state the trainer has with the wrapped optimizers."""
        state_exchange.note_lost(self._parameters, inners)
