# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's thread count between ``init()`` and ``shutdown()``."""

from __future__ import annotations

import torch

from torch_cpudist import host
from torch_cpudist.environment import Environment
from torch_cpudist.layout import Layout
from torch_cpudist.log import logger


class TorchThreads:
    """Sets torch's thread count, and gives back what was there before."""

    def __init__(self) -> None:
        """Nothing is changed yet."""
        self._before: int | None = None
        self._count = 0

    def take(self, environment: Environment, layout: Layout) -> None:
        """Takes ``CPUDIST_THREADS``, else this rank's share of its host's cores.

        A world of one shares its host with nobody: without ``CPUDIST_THREADS`` it keeps
        the count it has.
        """
        ranks = layout.ranks_on_host_of(environment.rank)
        if environment.threads is None and len(layout.hosts) == 1:
            return
        self._before = torch.get_num_threads()
        self._count = environment.threads or max(1, host.cores() // ranks)
        torch.set_num_threads(self._count)
        logger.info(
            "%d torch threads: %d cores, %d ranks on this host%s",
            self._count,
            host.cores(),
            ranks,
            ", CPUDIST_THREADS" if environment.threads else "",
        )

    def give_back(self) -> None:
        """Restores the count, unless somebody has set another since. Idempotent."""
        if self._before is not None and torch.get_num_threads() == self._count:
            torch.set_num_threads(self._before)
        self._before = None
