# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's thread count, and this rank's cores, between ``init()`` and ``shutdown()``.

Ranks on a host x torch threads of each = physical cores: fewer leave cores idle, more
fight for them. Replicas of a rank share its cores once a ``ReplicaExecutor`` is made,
which gives each of its threads a count of its own; a rank without one has them all.
"""

from __future__ import annotations

import os

import torch

from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout
from torch_cpudist.log import logger
from torch_cpudist.machine import topology


def threads_of(cores: int, ranks: int, replicas: int = 1) -> int:
    """Torch threads of a rank, or of each of its replicas."""
    return max(1, cores // (ranks * replicas))


def _who(environment: Environment) -> str:
    """Which variable has chosen the count, for the log."""
    if environment.threads:
        return "; CPUDIST_THREADS"
    return "; OMP_NUM_THREADS" if environment.openmp_threads else ""


class TorchThreads:
    """Sets torch's thread count and cores, and gives back what was there before."""

    def __init__(self) -> None:
        """Nothing is changed yet."""
        self._before: int | None = None
        self._count = 0
        self._cores_before: set[int] | None = None
        self._cores: set[int] = set()
        # What replicas of this rank share; without init() all that the process has.
        self.cores = topology.physical_cores()

    def take(self, environment: Environment, layout: Layout) -> None:
        """Takes ``CPUDIST_THREADS``, else this rank's share of its host's cores.

        Physical ones; with ``CPUDIST_PIN`` cores of its own. ``OMP_NUM_THREADS`` wins
        over the share, but for the 1 that torchrun puts there for several ranks. A
        world of one shares its host with nobody: it keeps the count it has, unless that
        is nobody's choice and more than its cores, or the quota of its cgroup, allow.

        Raises:
            ConfigurationError: ``CPUDIST_PIN`` with more ranks than cores.
        """
        rank = environment.rank
        ranks = layout.ranks_on_host_of(rank)
        cores = topology.physical_cores()
        self.cores = max(1, cores // ranks)
        if environment.pin:
            here = [r for r, h in enumerate(layout.hosts) if h == layout.hosts[rank]]
            self._pin(here.index(rank), ranks)
        before = torch.get_num_threads()
        chosen = environment.openmp_threads
        share = chosen or threads_of(cores, ranks)
        if len(layout.hosts) == 1:
            share = before if chosen else min(before, share)
        self._before = before
        self._count = environment.threads or share
        if self._count != before:
            # OpenMP's and MKL's counts too, whatever torchrun put into the environment.
            torch.set_num_threads(self._count)
        logger.info(
            "%d torch threads (were %d): %d physical cores, %d ranks on this host%s%s",
            self._count,
            before,
            cores,
            ranks,
            _who(environment),
            f"; pinned to cores {sorted(self._cores)}" if self._cores else "",
        )

    def _pin(self, index: int, ranks: int) -> None:
        mask = os.sched_getaffinity(0)
        self._cores = set(topology.deal(topology.read(mask), ranks)[index])
        self._cores_before = mask
        topology.pin_process(self._cores)
        self.cores = min(self.cores, topology.physical_cores())

    def give_back(self) -> None:
        """Restores all, unless somebody has set another count since. Idempotent."""
        if self._before is not None and torch.get_num_threads() == self._count:
            torch.set_num_threads(self._before)
        self._before = None
        if self._cores_before is not None:
            topology.pin_process(self._cores_before)
        self._cores_before = None
