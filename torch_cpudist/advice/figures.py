# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Figures``: what is known of a trainer's steps since its warm-up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """Counts and seconds since the warm-up, of one trainer; all that is judged.

    Attributes:
        seconds: of the clock.
        steps: that were made in them.
        strategy: its class.
        trainers, servers: of the run.
        one_host: all ranks of the run are on one.
        colocated: trainers serve.
        cores: physical ones that are this rank's share of its host.
        threads: of torch, for each of those that compute.
        replicas: of an executor; 0 without one.
        replicas_set: what ``CPU_NUM`` says; 0 if nothing.
        cores_busy: mean of the cores that this process has had; 0 if unknown.
        queued: seconds that its threads have waited for a core, all together.
        data_s: waiting for batches in loops over datasets; ``None`` without a loop.
        asleep_s: asleep, and neither for servers nor for other trainers; ``None``
            where other threads compute, or the kernel does not count.
        wait_s: blocked on servers.
        round_wait_s: of these, for rounds.
        collective_s: in collectives.
        in_rounds: steps of several trainers meet.
        bounded: ``max_staleness`` makes steps wait for others.
        load: share of its time that the busiest server's busiest thread was busy;
            ``None`` if no server can tell.
        requests, bytes: to and from servers.
        rows_pulled, rows_prefetched: of tables.
        together, alone: forwards whose rows were asked for at once, and lookups that
            asked by themselves.
        wire_dtype: what values travel as; empty where it cannot be chosen.
    """

    seconds: float
    steps: int
    strategy: str = "Sync"
    trainers: int = 1
    servers: int = 1
    one_host: bool = True
    colocated: bool = True
    cores: int = 1
    threads: int = 1
    replicas: int = 0
    replicas_set: int = 0
    cores_busy: float = 0.0
    queued: float = 0.0
    data_s: float | None = None
    asleep_s: float | None = None
    wait_s: float = 0.0
    round_wait_s: float = 0.0
    collective_s: float = 0.0
    in_rounds: bool = False
    bounded: bool = False
    load: float | None = None
    requests: int = 0
    bytes: int = 0
    rows_pulled: int = 0
    rows_prefetched: int = 0
    together: int = 0
    alone: int = 0
    wire_dtype: str = ""

    def share(self, seconds: float) -> float:
        """Of the time, 0 to 1."""
        return min(max(seconds / self.seconds, 0.0), 1.0) if self.seconds > 0 else 0.0

    @property
    def others_s(self) -> float:
        """Waiting for other trainers, in rounds; the way to servers and back is not.

        Where a round takes no longer than lookups of rows do, it waits for nobody.
        """
        if not self.in_rounds:
            return 0.0
        return max(self.round_wait_s - 2 * (self.wait_s - self.round_wait_s), 0.0)

    @property
    def servers_s(self) -> float:
        """Waiting for servers, or for messages on their way to and from them."""
        return self.wait_s - self.others_s

    @property
    def idle_s(self) -> float:
        """Waiting for batches: as a loop says, else where this thread slept."""
        if self.data_s is not None:
            return self.data_s
        return self.asleep_s or 0.0
