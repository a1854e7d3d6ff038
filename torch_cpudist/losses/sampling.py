# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws of classes whose probabilities are known, as negatives of a softmax."""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.losses.reduction import check_ids

# Draws for each class that is asked for, before the distribution counts as too steep.
_TRIES = 1000
_STATE = "generator"


class Negatives(NamedTuple):
    """Classes that were drawn, and how often they and the targets are expected to be.

    Attributes:
        ids: int64 ``[negatives]``.
        log_counts: float64 ``[negatives]``, log of how often each is expected among
            so many draws.
        target_log_counts: float64 ``[targets]``, the same of the targets.
    """

    ids: torch.Tensor
    log_counts: torch.Tensor
    target_log_counts: torch.Tensor


class Sampler(abc.ABC):
    """Draws classes 0 … ``classes`` - 1, each with a probability that is known.

    Every sampler has a generator of its own: samplers of one seed draw the same. All
    methods may be called from several threads. ``state_dict()`` is where it is in its
    draws (``opt.resume(..., state={"sampler": sampler})``).
    """

    def __init__(self, classes: int, *, seed: int | None = None) -> None:
        """Makes the generator.

        Args:
            classes: how many there are, 1 to 2**53.
            seed: of the draws, 0 to 2**63 - 1; default: drawn from torch's generator.

        Raises:
            InvalidArgumentError: out of range.
        """
        _check_whole(self, "classes", classes, 1, 2**53)
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        _check_whole(self, "seed", seed, 0, 2**63 - 1)
        self.classes = classes
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()

    @abc.abstractmethod
    def log_probability(self, ids: torch.Tensor) -> torch.Tensor:
        """Log of the probability of each class in one draw, float64.

        Args:
            ids: int64, classes.
        """

    @abc.abstractmethod
    def _drawn(self, uniform: torch.Tensor) -> torch.Tensor:
        """Classes for float64 numbers from 0 to below 1."""

    def draw(
        self, count: int, targets: torch.Tensor, *, unique: bool = True
    ) -> Negatives:
        """Draws negatives, the same ones for all targets.

        Args:
            count: how many classes are wanted.
            targets: int64 ``[targets]``, of the samples that they are for.
            unique: draw on until ``count`` different ones have come; a class is then
                expected 1 - (1 - p)**draws times. ``False``: ``count`` draws, among
                which a class is expected p * count times, and may come several times.

        Raises:
            InvalidArgumentError: more different classes than there are, or than come
                within 1000 draws for each; a target is no class or is never drawn.

        Cost: about 0.1 µs per draw.
        """
        what = f"{type(self).__name__}.draw"
        _check_whole(self, "count", count, 1, self.classes if unique else 2**31)
        targets = check_ids(f"{what}: targets", targets, -1)
        if len(targets) and not (
            0 <= int(targets.min()) and int(targets.max()) < self.classes
        ):
            raise InvalidArgumentError(
                f"{what}: expected targets from 0 to below {self.classes}, got "
                f"{int(targets.min())} to {int(targets.max())}"
            )
        with self._lock:
            ids, tries = self._unique(count) if unique else (self._some(count), count)

        def expected(classes: torch.Tensor) -> torch.Tensor:
            chance = self.log_probability(classes)
            if not unique:
                return chance + torch.tensor(float(count)).double().log()
            missed = tries * torch.log1p(-chance.exp())
            return torch.log(-torch.expm1(missed))

        target_counts = expected(targets.cpu())
        if not bool(torch.isfinite(target_counts).all()):
            never = int(targets.cpu()[~torch.isfinite(target_counts)][0])
            raise InvalidArgumentError(
                f"{what}: class {never} is a target, and its probability is 0: "
                "expected a sampler that may draw every class"
            )
        place = targets.device
        counts = expected(ids).to(place)
        return Negatives(ids.to(place), counts, target_counts.to(place))

    def _some(self, count: int) -> torch.Tensor:
        uniform = torch.rand(count, dtype=torch.float64, generator=self._generator)
        return self._drawn(uniform)

    def _unique(self, count: int) -> tuple[torch.Tensor, int]:
        """The first ``count`` different classes, and the draws until the last came."""
        drawn = self._some(count)
        while True:
            first = _first_places(drawn)
            if len(first) >= count:
                break
            if len(drawn) >= _TRIES * count:
                raise InvalidArgumentError(
                    f"{type(self).__name__}.draw: expected {count} different classes, "
                    f"found {len(first)} in {len(drawn)} draws: ask for fewer, or for "
                    "unique=False"
                )
            drawn = torch.cat([drawn, self._some(len(drawn))])
        first = first[:count]
        return drawn[first], int(first[-1]) + 1

    def state_dict(self) -> dict[str, Any]:
        """Where it is in its draws."""
        with self._lock:
            return {_STATE: self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there.

        Raises:
            InvalidArgumentError: this is no state of a sampler.
        """
        found = state.get(_STATE)
        if not isinstance(found, torch.Tensor) or found.dtype != torch.uint8:
            raise InvalidArgumentError(
                f"{type(self).__name__}: expected a state with {_STATE!r}, bytes of "
                f"torch's generator, found {sorted(state)}"
            )
        with self._lock:
            self._generator.set_state(found)


def _first_places(drawn: torch.Tensor) -> torch.Tensor:
    """Where each class comes first, in that order."""
    ordered, places = drawn.sort(stable=True)
    fresh = torch.ones(len(ordered), dtype=torch.bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    return places[fresh].sort().values


def _check_whole(what: object, name: str, given: Any, least: int, most: int) -> None:
    whole = isinstance(given, int) and not isinstance(given, bool)
    if not whole or not least <= given <= most:
        raise InvalidArgumentError(
            f"{type(what).__name__}: {name} must be a whole number of {least} to "
            f"{most}, got {given!r}"
        )
