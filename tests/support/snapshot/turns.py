# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Trainers of one process that wait for each other, and for a snapshot of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from pathlib import Path

from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory


class SideBySide:
    """Trainers of Async of whom none runs away, on however slow a machine.

    Who has ended marks no more, and a snapshot is of all.
    """

    def __init__(self, trainers: int, apart: int) -> None:
        """Nobody has begun.

        Args:
            trainers: how many there are.
            apart: so many steps more than who has made fewest one may make.
        """
        self._made: list[float] = [0] * trainers
        self._apart = apart
        self._changed = threading.Condition()

    def step_over(self, rank: int) -> None:
        """One has made a step; it waits for who is far behind."""
        with self._changed:
            self._made[rank] += 1
            self._changed.notify_all()
            near = self._changed.wait_for(
                lambda: self._made[rank] - min(self._made) < self._apart, PATIENCE_S
            )
        assert near, (rank, self._made)

    def ends(self, rank: int) -> None:
        """One makes no more: nobody waits for it."""
        with self._changed:
            self._made[rank] = math.inf
            self._changed.notify_all()


class Turns:
    """One trainer's turn after the other's."""

    def __init__(self) -> None:
        self._events: dict[Hashable, threading.Event] = {}
        self._lock = threading.Lock()

    def _event(self, name: Hashable) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def over(self, name: Hashable) -> None:
        """Lets those go on who wait for it."""
        self._event(name).set()

    def is_over(self, name: Hashable) -> bool:
        """Whether it was."""
        return self._event(name).is_set()

    def wait(self, name: Hashable) -> None:
        """Waits until another one has said that it is over."""
        assert self._event(name).wait(PATIENCE_S), name

    def have_one(
        self, opt: cpudist.DistributedOptimizer, rank: int, trainers: int, folder: Path
    ) -> None:
        """Saves once all trainers are here, if nothing was saved before.

        On a slow machine the first that a step has begun may be written all the time.
        """
        if rank != 0:
            opt.leave()
            self.over(rank)
            self.wait("saved")
            return
        for other in range(1, trainers):
            self.wait(other)
        if not Directory(folder).names():
            opt.save_snapshot("last")
        self.over("saved")
