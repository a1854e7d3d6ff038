# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The compiled c10d backends; built for one minor release of torch.

Load it with ``torch_cpudist.backends.load_c10d``, which says what to do where it does
not load.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
from torch._C._distributed_c10d import Backend, Store

TORCH_VERSION: Final[str]

class Host:
    """Which ranks of a group share a host with this one, and who leads each host."""

    @property
    def members(self) -> list[int]: ...
    @property
    def leaders(self) -> list[int]: ...
    @property
    def leader(self) -> int: ...

def meet(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> Host: ...
def create_shm(
    host: Host, rank: int, timeout: timedelta, global_ranks: Sequence[int]
) -> Backend: ...
def create_spanning(
    host: Host,
    rank: int,
    size: int,
    timeout: timedelta,
    global_ranks: Sequence[int],
    store: Store,
    between: Backend | None,
    everyone: Backend,
) -> Backend: ...
def shm_empty(backend: Backend, numel: int, dtype: torch.dtype) -> torch.Tensor: ...
def shm_hosts(backend: Backend) -> list[list[int]]: ...

class CclEngine:
    """The thread that calls oneCCL, for all groups of a process."""

    def __init__(self, library: str) -> None: ...
    @property
    def release(self) -> str: ...
    def stop(self) -> None: ...

def create_ccl(
    *,
    engine: CclEngine,
    store: Store,
    rank: int,
    size: int,
    id: int,
    timeout_ms: int,
    peers: Sequence[tuple[int, int, int]],
    checks: bool,
) -> Backend: ...
