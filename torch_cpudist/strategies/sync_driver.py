# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sync: a step is a round; the servers average the gradients and update once."""

from __future__ import annotations

import operator

from torch_cpudist import _core
from torch_cpudist.clip import Clip
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.parameter_set import ParameterSet

# Weights travel as float64, which holds whole numbers up to here exactly.
_MAX_SAMPLES = 2**53


def _whole_samples(samples: int) -> int:
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


class SyncDriver:
    """Runs the Sync strategy for one parameter set.

    Cost per step: one push and its reply per server, plus one pull per server and
    lookup.
    """

    def __init__(self, parameters: ParameterSet) -> None:
        """Drives ``parameters``."""
        self._parameters = parameters

    def step(
        self,
        configs: list[_core.OptimizerConfig],
        samples: int | None,
        clip: Clip | None,
    ) -> int:
        """Pushes this trainer's gradients and waits until the round is applied.

        Args:
            configs: hyper-parameters, one per group; equal on every trainer.
            samples: weigh by this count; ``None`` weighs all trainers equally.
            clip: clipping of the averaged gradient.

        Returns:
            The number of the round.

        Raises:
            InvalidArgumentError: ``samples`` is no whole number or out of range;
                nothing was sent.
        """
        if samples is not None:
            samples = _whole_samples(samples)
        return self._parameters.push(configs, samples, clip)

    def flush(self, pull: str) -> None:
        """Refreshes local copies; pushes are applied when step returns.

        Args:
            pull: ``"all"``, ``"dense"`` or ``"none"``.
        """
        if pull not in ("all", "dense", "none"):
            raise InvalidArgumentError(
                f"flush: pull must be 'all', 'dense' or 'none', got {pull!r}"
            )
        if pull != "none":
            self._parameters.pull_dense()
        if pull == "all":
            self._parameters.pull_tables()

    def leave(self) -> None:
        """Ends this trainer's part in rounds; the next step joins again."""
        self._parameters.client.leave(self._parameters.id)
