# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What runs a strategy for one parameter set: when to push, pull and wait."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod

from torch_cpudist import _core
from torch_cpudist.clip import Clip
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.parameter_set import ParameterSet

# Weights travel as float64, which holds whole numbers up to here exactly.
_MAX_SAMPLES = 2**53


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
        configs: list[_core.OptimizerConfig],
        samples: int | None,
        clip: Clip | None,
    ) -> int:
        """Hands this trainer's gradients on.

        Args:
            configs: hyper-parameters of this step, one per group.
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

    def flush(self, pull: str) -> None:
        """Settles and refreshes local copies.

        Args:
            pull: ``"all"``, ``"dense"`` or ``"none"``.
        """
        self.settle()
        if pull != "none":
            self._parameters.pull_dense()
        if pull == "all":
            self._parameters.pull_tables()

    def leave(self) -> None:
        """Ends this trainer's part, once what was handed on is applied."""
        self._parameters.client.leave(self._parameters.id)
