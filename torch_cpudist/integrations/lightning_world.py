# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who this trainer is among the others, as Lightning asks for it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning.pytorch.plugins.environments import ClusterEnvironment

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch import context, environment
from torch_cpudist.launch.context import Context
from torch_cpudist.settings.jobs import ROLES


@dataclass(frozen=True)
class Place:
    """One trainer's place.

    Attributes:
        rank, count: among all trainers.
        local_rank, local_count: among those of its host.
        host, hosts: which host it is on, and how many have trainers.
        address, port: of the launcher's rendezvous; empty and 0 without one.
    """

    rank: int
    count: int
    local_rank: int
    local_count: int
    host: int
    hosts: int
    address: str
    port: int


def _in_run(opened: Context) -> Place:
    """The place in a run, whose ranks have told each other where they are."""
    layout, made = opened.layout, opened.environment
    if opened.role != "trainer":
        raise ConfigurationError(
            f"a Trainer on rank {opened.rank}, which is a dedicated server: it calls "
            "cpudist.serve() instead (if cpudist.is_server(): cpudist.serve())."
        )
    if opened.trainer_count != len(layout.trainers):
        raise ConfigurationError(
            f"{opened.trainer_count} trainers, of which {len(layout.trainers)} are in "
            "this torchrun job: Lightning's samplers and sync_dist know one job only. "
            "Start all trainers in one job, or write the loop yourself."
        )
    hosts = [layout.hosts[rank] for rank in layout.trainers]
    rank = layout.trainers.index(opened.rank)
    distinct = list(dict.fromkeys(hosts))
    return Place(
        rank=rank,
        count=len(hosts),
        local_rank=hosts[:rank].count(hosts[rank]),
        local_count=hosts.count(hosts[rank]),
        host=distinct.index(hosts[rank]),
        hosts=len(distinct),
        address=made.master_addr or "",
        port=made.master_port,
    )


def _launched() -> Place:
    """The place that the environment says, before ``init()``: all ranks train."""
    made = environment.parse(os.environ)
    if made.servers or made.apart is not None or made.role_name in ROLES:
        raise ConfigurationError(
            "a Trainer before cpudist.init(), where some ranks only serve: which "
            "trainer this is is known after it. Call cpudist.init() first, "
            "cpudist.serve() on servers, and cpudist.shutdown() at the end."
        )
    local = min(made.local_world_size, made.world_size)
    return Place(
        rank=made.rank,
        count=made.world_size,
        local_rank=made.local_rank,
        local_count=local,
        host=made.group_rank,
        hosts=-(-made.world_size // local),
        address=made.master_addr or "",
        port=made.master_port,
    )


class Trainers(ClusterEnvironment):
    """The trainers of the run, or of the launcher as long as ``init()`` is to come."""

    def __init__(self) -> None:
        """Looks at nothing yet."""
        self._place: Place | None = None

    @property
    def place(self) -> Place:
        """This trainer's place.

        Raises:
            ConfigurationError: this rank does not train, or it is not known yet.
        """
        if self._place is None:
            opened = context.last()
            self._place = _launched() if opened is None else _in_run(opened)
        return self._place

    def look_again(self) -> None:
        """Forgets the place: ``init()`` has been called since."""
        self._place = None

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning starts none."""
        return True

    @property
    def main_address(self) -> str:
        """Host of the launcher's rendezvous."""
        return self.place.address

    @property
    def main_port(self) -> int:
        """Port of the launcher's rendezvous."""
        return self.place.port

    @staticmethod
    def detect() -> bool:
        """Never chosen by Lightning itself."""
        return False

    def world_size(self) -> int:
        """How many trainers."""
        return self.place.count

    def set_world_size(self, size: int) -> None:
        """Not Lightning's to say."""

    def global_rank(self) -> int:
        """This trainer's number."""
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """Not Lightning's to say."""

    def local_rank(self) -> int:
        """Its number on its host."""
        return self.place.local_rank

    def node_rank(self) -> int:
        """Its host's number."""
        return self.place.host
