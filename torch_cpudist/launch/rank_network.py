# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``CPUDIST_TRANSPORT=c10d``: pushes and pulls over a collective backend's send/recv.

For fabrics that only the backend reaches. It is a group of its own over all ranks,
servers included, that torch.distributed does not list: nothing that a script sends
there can come between.
"""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from torch_cpudist.backends import ccl, load_c10d, shm
from torch_cpudist.errors import (
    BackendUnavailableError,
    ConfigurationError,
    Error,
)
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout
from torch_cpudist.log import logger
from torch_cpudist.machine import host

# Those that move bytes of the CPU from any thread.
BACKENDS = ("gloo", "shm", "ccl")
_INTERFACE = "GLOO_SOCKET_IFNAME"


def backend_of(environment: Environment) -> str:
    """The backend that carries frames: the one of ``CPUDIST_BACKEND``, or gloo."""
    return "gloo" if environment.backend == "auto" else environment.backend


def check(environment: Environment, threads: bool) -> None:
    """Refuses what ``CPUDIST_TRANSPORT=c10d`` cannot serve, before anybody waits.

    Args:
        environment: of this rank; any transport.
        threads: whether ranks are threads over an in-process network.

    Raises:
        ConfigurationError: says what to set.
    """
    if environment.transport != "c10d":
        return
    if threads:
        raise ConfigurationError(
            "CPUDIST_TRANSPORT=c10d with init(network=): ranks that are threads talk "
            "over their in-process network. Unset it, or start processes."
        )
    if environment.apart is not None:
        raise ConfigurationError(
            "CPUDIST_TRANSPORT=c10d needs servers and trainers in one torchrun job, "
            "whose ranks one group can hold, but CPUDIST_ROLE starts jobs of their "
            "own. Set CPUDIST_TRANSPORT=tcp, or launch all together with "
            "CPUDIST_SERVERS or torchrun --role."
        )
    if environment.secret_required:
        raise ConfigurationError(
            "CPUDIST_TRANSPORT=c10d with CPUDIST_AUTH=require: frames travel over "
            "links of the collective backend, which prove nothing. Set "
            "CPUDIST_TRANSPORT=tcp, or unset CPUDIST_AUTH and close the network "
            "(SECURITY.md)."
        )
    if environment.secret is not None:
        logger.warning(
            "CPUDIST_TRANSPORT=c10d: the key that is set guards nothing that travels "
            "over the collective backend (SECURITY.md)."
        )
    name = backend_of(environment)
    if name not in BACKENDS:
        raise ConfigurationError(
            f"CPUDIST_TRANSPORT=c10d with CPUDIST_BACKEND={name}: frames travel over "
            f"{', '.join(BACKENDS)}, which move memory of the CPU from any thread. "
            "Choose one of them, or CPUDIST_TRANSPORT=tcp."
        )


def peers_of(layout: Layout, rank: int) -> list[int]:
    """The ranks that ``rank`` has a link to: trainers of servers, servers of trainers.

    Args:
        layout: roles of all ranks.
        rank: of this process.
    """
    found: set[int] = set()
    if rank in layout.servers:
        found.update(layout.trainers)
    if rank in layout.trainers:
        found.update(layout.servers)
    return sorted(found - {rank})


def _make_gloo(options: SimpleNamespace, at: str) -> Any:
    """Gloo on the interface of an address, unless the environment names another."""
    gloo: Any = dist.ProcessGroupGloo
    place = (options.store, options.group_rank, options.group_size)
    name = None if _INTERFACE in os.environ else host.interface_of(at)
    if name is None:
        return gloo(*place, timeout=options.timeout)
    settings = gloo._Options()
    settings._devices = [gloo.create_device(interface=name)]
    settings._timeout = options.timeout
    settings._threads = 1  # collectives run in them, and there are none
    return gloo(*place, settings)


def open_transport(
    environment: Environment,
    layout: Layout,
    store: Store,
    timeout_s: float,
    own_address: str,
) -> object:
    """Makes the group. Collective over all ranks.

    Args:
        environment: of this rank.
        layout: roles of all ranks.
        store: of this group alone.
        timeout_s: longest wait for the other ranks, in seconds.
        own_address: of this host, which the others reach.

    Returns:
        What ``_core.RankNetwork`` takes.

    Raises:
        BackendUnavailableError: the backend does not load, or cannot connect the ranks.
    """
    name = backend_of(environment)
    module = load_c10d(name)
    rank, size = environment.rank, len(layout.hosts)
    # What torch.distributed gives to one who makes a backend.
    options = SimpleNamespace(
        store=PrefixStore(name, store),
        group_rank=rank,
        group_size=size,
        global_ranks_in_group=list(range(size)),
        timeout=timedelta(seconds=max(1.0, timeout_s)),
    )
    try:
        if name == "gloo":
            backend = _make_gloo(options, own_address)
        else:
            backend = {"shm": shm, "ccl": ccl}[name].create(options, None)
    except Error:
        raise
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"CPUDIST_TRANSPORT=c10d: {name} cannot connect the {size} ranks "
            f"({error}). Set CPUDIST_TRANSPORT=tcp, or another CPUDIST_BACKEND."
        ) from error
    logger.info("pushes and pulls travel over %s, %d ranks", name, size)
    transport: object = module.make_rank_transport(backend)
    return transport
