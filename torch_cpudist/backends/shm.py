# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend ``shm``: collectives through shared memory among ranks of one host."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torch_cpudist.backends.loading import load_c10d
from torch_cpudist.errors import BackendUnavailableError

NAME = "shm"
# Whether a group may have members on several hosts.
SPANS_HOSTS = False


def check() -> None:
    """Checks, within milliseconds, that the backend can be used here.

    Raises:
        BackendUnavailableError: says what to do.
    """
    if not hasattr(load_c10d(NAME), "create_shm"):
        raise BackendUnavailableError("backend shm: it is not part of this build.")


def create(options: Any, backend_options: Any) -> Any:
    """Makes the backend of one group; torch.distributed calls it. Collective.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        backend_options: ``pg_options`` of the caller.

    Raises:
        BackendUnavailableError: the compiled backends do not load.
    """
    return load_c10d(NAME).create_shm(
        options.store, options.group_rank, options.group_size, options.timeout
    )


def register() -> None:
    """Makes ``shm`` known to torch.distributed. Idempotent."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
