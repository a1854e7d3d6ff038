# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch.distributed's default group over the trainers: samplers and DDP just work."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.launch.backend_choice import choose
from torch_cpudist.launch.endpoints import own_address
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout
from torch_cpudist.launch.rendezvous import Rendezvous
from torch_cpudist.log import logger
from torch_cpudist.machine import host

_INTERFACE = "GLOO_SOCKET_IFNAME"


class DefaultGroup:
    """The default group, made here or found; destroyed only if it was made here."""

    def __init__(self) -> None:
        """No group yet."""
        self._made = False
        self._interface_set = False
        self.backend = "gloo"  # of the trainers, once they have joined

    def check(self, environment: Environment, layout: Layout) -> None:
        """Raises what ``join`` would raise on this rank alone."""
        if environment.rank in layout.trainers:
            choose(environment, layout)
        if dist.is_initialized():
            self._check_existing(environment, layout)

    def join(
        self, environment: Environment, layout: Layout, rendezvous: Rendezvous
    ) -> dist.ProcessGroup | None:
        """Makes the default group over the trainers, or checks the one that exists.

        Returns:
            The group; ``None`` on a dedicated server.

        Raises:
            ConfigurationError: a group exists that does not hold exactly the trainers.
            BackendUnavailableError: ``CPUDIST_BACKEND`` names one that cannot be used.
        """
        training = environment.rank in layout.trainers
        chosen = choose(environment, layout) if training else None
        if chosen is not None:
            self.backend = chosen.name
        if dist.is_initialized():
            self._check_existing(environment, layout)
            return dist.group.WORLD
        if chosen is None:
            return None
        if _INTERFACE not in os.environ:
            # gloo would pick the interface of the host name, which other hosts may not
            # reach and which need not be loopback on one host. Groups made later and
            # ccl read it too.
            name = host.interface_of(own_address(environment, layout))
            if name is not None:
                os.environ[_INTERFACE] = name
                self._interface_set = True
        dist.init_process_group(
            chosen.spec,
            store=rendezvous.group_store(),
            rank=layout.trainers.index(environment.rank),
            world_size=len(layout.trainers),
            timeout=timedelta(milliseconds=environment.round_deadline_ms),
        )
        self._made = True
        count = len(layout.trainers)
        logger.info("backend %s (%s), %d trainers", chosen.spec, chosen.why, count)
        self._check_existing(environment, layout)  # mpirun numbers ranks by itself
        return dist.group.WORLD

    def _check_existing(self, environment: Environment, layout: Layout) -> None:
        remedy = (
            "Call cpudist.init() first and use the group it makes, or "
            "destroy_process_group() before init()."
        )
        if environment.rank not in layout.trainers:
            raise ConfigurationError(
                "torch.distributed is initialised on a dedicated server, which is no "
                f"part of the trainers' group. {remedy}"
            )
        expected = (layout.trainers.index(environment.rank), len(layout.trainers))
        found = (dist.get_rank(), dist.get_world_size())
        if found != expected:
            raise ConfigurationError(
                "torch.distributed's default group has this process as rank "
                f"{found[0]} of {found[1]}, but it is trainer {expected[0]} of "
                f"{expected[1]}. {remedy}"
            )

    def leave(self) -> None:
        """Destroys the group if it was made here. Idempotent."""
        if self._made and dist.is_initialized():
            dist.destroy_process_group()
        self._made = False
        if self._interface_set:
            os.environ.pop(_INTERFACE, None)
            self._interface_set = False
