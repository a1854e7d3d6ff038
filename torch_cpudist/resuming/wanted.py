# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots that servers want before they end, as trainer 0 sees them."""

from __future__ import annotations

import contextlib
import time

from torch_cpudist.errors import SnapshotError
from torch_cpudist.launch.wanted_saves import WantedSaves
from torch_cpudist.snapshot.directory import Directory

# A look is one call of the file system, between two steps.
LOOK_S = 0.2


class Wanted:
    """Of one optimizer, on trainer 0. From the thread that steps."""

    def __init__(self, directory: Directory, run_id: int, number: int) -> None:
        """Nothing was seen yet.

        Args:
            directory: of snapshots, in which servers ask.
            run_id: of the run.
            number: which of the run's optimizers it is.
        """
        self._files = WantedSaves(directory.path, run_id, directory.files)
        self._number = number
        self._looked_s = 0.0
        self._before: int | None = None

    def due(self, idle: bool, saved: int) -> bool:
        """Whether a snapshot is to be taken now, as a server waits for one.

        One that is being written is of before: it does not do.

        Args:
            idle: none is marked or being written.
            saved: how many were committed so far.
        """
        if self._before is not None:
            if not idle:
                return False
            if saved > self._before:
                self._before = None
                # Where that fails the server waits for its grace.
                with contextlib.suppress(SnapshotError):
                    self._files.answer(self._number)
                return False
        elif not self._seen():
            return False
        self._before = saved if idle else None
        return idle

    def _seen(self) -> bool:
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return False
        self._looked_s = now
        try:
            return self._files.wanted(self._number)
        except SnapshotError:
            return False
