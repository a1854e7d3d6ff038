# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A trainer whose every push makes rows of a remote table; needs the core and numpy.

Rows begin with 3 and lose 1 by every gradient that is applied, or a half where two
trainers share a round. Every push names new rows, and the rows that all pushes name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, DIM = 1 << 40, 4
EACH = 64  # new rows of a push
SHARED = np.arange(16, dtype=np.int64)
BEGINS = 3.0


def new_rows(rank: int, step: int) -> np.ndarray:
    """Keys that only this push names."""
    first = (rank + 1) * (1 << 30) + step * EACH
    return np.arange(first, first + EACH, dtype=np.int64)


class CreatingTrainer:
    """A trainer of two, of servers at these addresses."""

    def __init__(self, core: Any, rank: int, on_arrival: bool, servers: Any) -> None:
        self.core, self.rank, self.on_arrival = core, rank, on_arrival
        self.config = core.OptimizerConfig("sgd", lr=1.0)
        self.client = core.Client(
            run_id=7, trainer_rank=rank, trainer_count=2, servers=servers
        )

    def begin(self) -> None:
        """Connects; returns when both have."""
        self.client.connect()
        spec = self.core.TableSpec(
            "words", ROWS, DIM, remote=True, seed=1, initial=[("fill", BEGINS, 0)]
        )
        self.set = self.client.open(
            self.core.ParamSetLayout(
                configs=[self.config],
                tables=[spec],
                blocks=[],
                on_arrival=self.on_arrival,
            )
        )
        self.set.ready()
        if self.on_arrival:
            self.queue = self.set.start_queue(
                size=1, max_merge=1, mean=[False], pull_every=1
            )

    def lookup(self, keys: np.ndarray, keep: bool = True) -> np.ndarray:
        """Rows as the servers hold them, [keys, DIM]."""
        out = np.empty((len(keys), DIM), np.float32)
        self.set.lookup(0, keys.ctypes.data, len(keys), False, out.ctypes.data, keep)
        return out

    def step(self, number: int) -> None:
        """One gradient of ones; under rounds returns when it is applied."""
        keys = np.concatenate((SHARED, new_rows(self.rank, number)))
        self.lookup(keys)
        ones = np.ones((len(keys), DIM), np.float32)
        table = (0, keys.ctypes.data, len(keys), ones.ctypes.data)
        if self.on_arrival:
            self.queue.enqueue(configs=[self.config], tables=[table])
        else:
            self.set.push(
                configs=[self.config], parameters=[], tables=[table], weights=[]
            )
