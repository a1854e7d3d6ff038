# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The average of parameters that servers keep beside them."""

from __future__ import annotations

from dataclasses import dataclass

from torch_cpudist.errors import InvalidArgumentError


@dataclass(frozen=True)
class EMA:
    """An exponential moving average of every parameter, kept by the servers.

    After every update of a server ``average = decay * average + (1 - decay) * value``,
    and the value itself after the first one, as torch's ``AveragedModel`` with
    ``get_ema_multi_avg_fn(decay)`` does after every step. Under Sync an update is a
    round, under HalfAsync a round of any group, under Async a push: with N trainers
    ``decay ** (1 / N)`` averages over as many samples as ``decay`` does with one. Rows
    and blocks that an update does not touch are averaged when they are next needed, at
    no cost until then. What is stored anew (``store_model``, ``load_state_dict``) has
    itself for its average.

    Cost: ``4 * dim`` bytes per row and the size of every dense parameter, on servers;
    no messages; one pass over the touched values per update.

    Attributes:
        decay: what the average keeps of itself in an update, > 0 and < 1.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        """Checks the value."""
        try:
            inside = 0 < self.decay < 1
        except TypeError:
            inside = False
        if not inside:
            raise InvalidArgumentError(
                f"EMA: decay must be > 0 and < 1, got {self.decay!r}"
            )


def check_average(average: object) -> None:
    """Raises ``InvalidArgumentError`` for what is neither ``None`` nor an ``EMA``."""
    if average is not None and not isinstance(average, EMA):
        raise InvalidArgumentError(
            f"DistributedOptimizer: average must be EMA, got {average!r}. Pass "
            "average=cpudist.EMA(0.999)."
        )
