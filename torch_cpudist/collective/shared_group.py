# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Collectives among all trainers that belong to no optimizer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from torch_cpudist.collective import opening
from torch_cpudist.collective.group import CollectiveGroup
from torch_cpudist.errors import Error

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

_OWNER = "cpudist.metrics"


class SharedGroup:
    """A group of all trainers, made when it is first needed; of a run.

    Thread safety: one collective at a time, others wait; but trainers must agree on the
    order, so that only one thread of each should call.
    """

    def __init__(self, run: Run) -> None:
        """No group yet."""
        self._run = run
        self._lock = threading.Lock()
        self._group: CollectiveGroup | None = None
        self._error: Error | None = None

    def gather(self, what: str, words: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Returns every trainer's ``words`` ``[n]``, all of one length, by rank.

        Collective. After an error the trainers are not at one place any more, and every
        later call raises it again.

        Args:
            what: what it is for, for messages.
            words: this trainer's.

        Raises:
            BackendUnavailableError: the trainers have no group for CPU tensors.
            PeerLostError, OperationTimeoutError: a trainer died or does not come.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                group = self._opened()
                found = group.gather(torch.from_numpy(words.astype(np.int64)), what)
            except Error as error:
                self._error = error
                raise
        return [np.asarray(one.numpy()) for one in found]

    def _opened(self) -> CollectiveGroup:
        if self._group is None:
            if self._run.process_group is not None:
                # Making a group waits for all without looking whether they live.
                opening.wait_for_all(
                    self._run,
                    f"{self._run.run_id}/{_OWNER}",
                    "came to the first compute_all()",
                    "Call it on all, also where there were no samples.",
                )
            self._group = CollectiveGroup(self._run, _OWNER)
        return self._group

    def close(self) -> None:
        """Gives connections back. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def shared_group(run: Run) -> SharedGroup:
    """The one of ``run``, which ends with it.

    Raises:
        ClosedError, ForkedProcessError: the run cannot be used any more.
    """
    return run.owned("shared_group", lambda: SharedGroup(run))
