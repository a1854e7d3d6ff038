# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Baseline``: where a trainer's warm-up has ended, and what was counted by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_cpudist.launch.moment import Moment, moment_of

# Steps that load code, compile it, and touch memory for the first time.
WARM_UP_STEPS = 5


class Baseline:
    """Counts an optimizer's steps in this process, and keeps the moment after a few.

    Thread safety: one thread, the one that steps. Cost: an addition per step.

    Attributes:
        replicas: of the executor that steps this optimizer, and torch threads of each;
            ``None`` without one.
    """

    def __init__(self) -> None:
        """No step yet."""
        self.replicas: tuple[int, int] | None = None
        self._count = 0
        self._then: Moment | None = None

    @property
    def steps(self) -> int:
        """Steps since the beginning, those of the warm-up too."""
        return self._count

    @property
    def then(self) -> Moment | None:
        """The end of the warm-up; ``None`` before."""
        return self._then

    def count(
        self,
        stats: Callable[[], Mapping[str, Any]],
        loops: Callable[[], Mapping[str, float]],
    ) -> None:
        """A step has ended.

        Args:
            stats: of the optimizer; called once, at the end of the warm-up.
            loops: of the run, as well.
        """
        self._count += 1
        if self._count == WARM_UP_STEPS:
            self._then = moment_of(stats(), loops())

    def begin_anew(self) -> None:
        """What was counted so far is of another run: its servers have gone."""
        self._count, self._then = 0, None
