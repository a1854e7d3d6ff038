# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend ``shm``: collectives through shared memory among ranks of one host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from torch_cpudist.backends.loading import load_c10d
from torch_cpudist.errors import InvalidArgumentError

NAME = "shm"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """``pg_options`` of a group.

    Attributes:
        host: what takes the place of this machine's identity when ranks find out who
            shares a host; empty: the identity, which is that of its last start and of
            the namespace of process ids.
    """

    host: str = ""


def create(options: Any, backend_options: Any) -> Any:
    """Makes the backend of one group; torch.distributed calls it. Collective.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        backend_options: ``pg_options`` of the caller: ``Options`` or nothing.

    Raises:
        BackendUnavailableError: the compiled backends do not load.
        InvalidArgumentError: ``pg_options`` are not ``Options``.
    """
    if not isinstance(backend_options, Options | None):
        raise InvalidArgumentError(
            "backend shm: expected pg_options=torch_cpudist.backends.shm.Options(...), "
            f"found {type(backend_options).__name__}"
        )
    module = load_c10d(NAME)
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout, names = options.timeout, options.global_ranks_in_group
    named = "" if backend_options is None else backend_options.host
    host = module.meet(store, rank, size, timeout, named)
    if len(host.leaders) == 1:
        return module.create_shm(host, rank, timeout, names)
    between = None
    if rank == host.leader:
        between = dist.ProcessGroupGloo(
            PrefixStore("between/", store),
            host.leaders.index(rank),
            len(host.leaders),
            timeout=timeout,
        )
    everyone = dist.ProcessGroupGloo(
        PrefixStore("everyone/", store), rank, size, timeout=timeout
    )
    return module.create_spanning(
        host, rank, size, timeout, names, store, between, everyone
    )


def backend_of(group: dist.ProcessGroup | None) -> Any:
    """The backend of a group, the default one's for ``None``, if it is ``shm``.

    Returns:
        ``None`` if the group's backend is another one.
    """
    if dist.get_backend(group) != NAME:
        return None
    found = dist.group.WORLD if group is None else group
    return None if found is None else found._get_backend(_CPU)


def hosts(group: dist.ProcessGroup | None) -> list[list[int]]:
    """Which ranks of a group share memory; one entry for each host.

    Raises:
        InvalidArgumentError: the group's backend is not ``shm``.
    """
    found: list[list[int]] = load_c10d(NAME).shm_hosts(_required(group, "hosts"))
    return found


def _required(group: dist.ProcessGroup | None, what: str) -> Any:
    backend = backend_of(group)
    if backend is None:
        raise InvalidArgumentError(
            f"shm.{what}: expected a group of backend shm, found "
            f"{dist.get_backend(group)}; make it with backend='shm'"
        )
    return backend


def empty(
    group: dist.ProcessGroup | None, numel: int, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor in memory that all ranks of a group map.

    ``all_reduce`` of it, or of a part that is at the same place on all ranks, sums
    without copying in or out. Otherwise it is a tensor as any other. Its memory lives
    as long as the tensor, on every rank for itself.

    Collective: every rank calls it with the same arguments, in the order of its other
    collectives. Costs two small collectives; any thread may call it.

    Args:
        group: the group; ``None``: the default one.
        numel: elements.
        dtype: their dtype.

    Returns:
        ``[numel]``, zeros. Over several hosts, those of one host share it.

    Raises:
        InvalidArgumentError: the group's backend is not ``shm``.
        ConfigMismatchError: ranks ask for different sizes.
        OverloadedError: the system has no memory for it.
        PeerLostError, OperationTimeoutError: a rank does not come.
    """
    backend = _required(group, "empty")
    tensor: torch.Tensor = load_c10d(NAME).shm_empty(backend, numel, dtype)
    return tensor
