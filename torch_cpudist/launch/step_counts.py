# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compares, at a barrier, how many steps trainers have taken in rounds.

A round is made of the n-th step of every member. A trainer that skips a batch without a
step takes part in the same round with a later batch, and all end differently; nobody
notices by anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from torch_cpudist.errors import AddressError
from torch_cpudist.log import logger

if TYPE_CHECKING:
    from torch_cpudist.launch.rendezvous import Rendezvous


class Counted(Protocol):
    """Whose steps are counted."""

    def round_steps(self) -> dict[str, Any] | None:
        """Its steps since the last barrier; ``None`` if they are no rounds.

        Returns:
            ``steps``, ``group`` whose rounds they were, whether it has ``left`` since.
        """

    def begin_counting(self) -> None:
        """Counts from here on."""


class StepCounts:
    """Counts of one run, from barrier to barrier. Not thread-safe.

    Cost: one value per trainer and barrier in the rendezvous store, which the first
    trainer reads; nothing without optimizers whose steps are rounds, in a world of one,
    and for trainers in jobs of their own, which share no store.
    """

    def __init__(
        self, rendezvous: Rendezvous | None, trainer_rank: int, trainer_count: int
    ) -> None:
        """No barrier yet.

        Args:
            rendezvous: the store of all trainers; ``None`` where they share none.
            trainer_rank: of this trainer.
            trainer_count: of the run.
        """
        self._rendezvous = rendezvous if trainer_count > 1 else None
        self._rank = trainer_rank
        self._count = trainer_count
        self._barriers = 0
        self._warned: WeakSet[Counted] = WeakSet()

    def before(self, participants: Sequence[Counted]) -> None:
        """Tells the others of this trainer's steps."""
        counts = [one.round_steps() for one in participants]
        # It counts once it has ended: one that is interrupted may be called again.
        barrier = self._barriers + 1
        if self._rendezvous is not None and any(counts):
            with contextlib.suppress(AddressError):
                told = {"barrier": barrier, "counts": counts}
                self._rendezvous.show(self._key(barrier, self._rank), told)

    def after(self, participants: Sequence[Counted]) -> None:
        """Warns, once per optimizer and on one trainer, where steps differ."""
        self._barriers += 1
        counts = [one.round_steps() for one in participants]
        if self._rendezvous is not None and any(counts):
            with contextlib.suppress(AddressError):
                told = dict(self._others(self._rendezvous))
                told[self._rank] = counts
                # All who are here have told before they came.
                if min(told) == self._rank:
                    self._compare(participants, told)
        for one in participants:
            one.begin_counting()

    def _others(self, rendezvous: Rendezvous) -> Iterator[tuple[int, list[Any]]]:
        for rank in range(self._count):
            told = None
            if rank != self._rank:
                told = rendezvous.shown(self._key(self._barriers, rank))
            if told is not None and told["barrier"] == self._barriers:
                yield rank, told["counts"]
                if rank < self._rank:
                    return  # it compares

    @staticmethod
    def _key(barrier: int, rank: int) -> str:
        # Who comes to the next but one has let everybody read this one.
        return f"steps/{barrier % 2}/{rank}"

    def _compare(
        self, participants: Sequence[Counted], told: dict[int, list[Any]]
    ) -> None:
        for number, participant in enumerate(participants):
            if participant in self._warned:
                continue
            found = {
                rank: counts[number]
                for rank, counts in told.items()
                if len(counts) > number and counts[number] is not None
            }
            for group in sorted({one["group"] for one in found.values()}):
                members = {r: one for r, one in found.items() if one["group"] == group}
                most = max(one["steps"] for one in members.values())
                fewer = [
                    rank
                    for rank, one in members.items()
                    if one["steps"] < most and not one["left"]
                ]
                if fewer:
                    self._warned.add(participant)
                    _warn({r: one["steps"] for r, one in members.items()}, fewer)


def _warn(steps: dict[int, int], fewer: list[int]) -> None:
    counted = ", ".join(f"trainer {rank} {steps[rank]}" for rank in sorted(steps))
    names = ", ".join(f"trainer {rank}" for rank in sorted(fewer))
    logger.warning(
        "barrier: trainers took different numbers of steps since the last one: %s. "
        "Rounds pair the n-th steps of all. If %s skipped batches (`continue`, say), "
        "later ones were averaged with other batches than meant, and the last rounds "
        "without it: call opt.step(samples=0) for a batch that is skipped. If it had "
        "fewer batches, all is as it should be: opt.leave() before it says so. "
        "This is told once.",
        counted,
        names,
    )
