# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Backends of torch.distributed that this package brings.

Importing the package registers them: ``dist.init_process_group("shm")`` works. Their
compiled part is loaded when the first group is made.
"""

from __future__ import annotations

import torch.distributed as dist

from torch_cpudist.backends import ccl, shm
from torch_cpudist.backends.loading import load_c10d

__all__ = ["ccl", "load_c10d", "register", "shm"]


def register() -> None:
    """Makes the backends known to torch.distributed. Idempotent."""
    if not dist.is_available():
        return
    for backend in (shm, ccl):
        if backend.NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(
                backend.NAME, backend.create, extended_api=True, devices=["cpu"]
            )


register()
