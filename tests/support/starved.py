# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A process whose address space is full, and wraps a table."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.served import room

ROWS, DIM = 2_000_000, 4
_LEFT_BYTES = 48 << 20


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, DIM, sparse=True)


def _address_space_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmSize:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def checked(context: cpudist.Context, report: Any) -> str:
    """What a table that is found not to fit is refused with."""
    model = _Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space_bytes() + _LEFT_BYTES
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        cpudist.DistributedOptimizer(inner, model)
    except cpudist.OutOfMemoryError as refused:
        return str(refused)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return "it was not refused"


def unchecked(context: cpudist.Context, report: Any) -> str:
    """What a server says that finds no memory, where nobody has looked before."""
    room.SMALL_BYTES = 1 << 50
    return checked(context, report)
