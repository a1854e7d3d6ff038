# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plain data from one trainer to the others: torch's own would send code with it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_cpudist.errors import InvalidArgumentError

DataT = TypeVar("DataT")


def _packed(value: Any) -> bytes:
    path = isinstance(value, Path)
    data = io.BytesIO()
    torch.save({"path": path, "value": str(value) if path else value}, data)
    return data.getvalue()


def _unpacked(data: bytes) -> Any:
    found = torch.load(io.BytesIO(data), weights_only=True)
    return Path(found["value"]) if found["path"] else found["value"]


def broadcast(value: DataT, source: int) -> DataT:
    """Returns what ``source`` has, on all ranks of the default group. Collective.

    Args:
        value: numbers, text, ``None``, tensors, and lists, tuples and dicts of them; or
            a path.
        source: rank of the default group.

    Raises:
        InvalidArgumentError: it is something else; on all ranks.
    """
    mine = dist.get_rank() == source
    data = b""
    if mine:
        try:
            data = _packed(value)
            _unpacked(data)
        except Exception:
            data = b""
    size = torch.tensor([len(data)])
    dist.broadcast(size, source)
    if not size:
        what = type(value).__name__ if mine else "what trainer 0 has"
        raise InvalidArgumentError(
            f"broadcast of {what}: expected numbers, text, None, tensors, lists, "
            "tuples and dicts of them, or a path. Send the parts of it that are such."
        )
    flat = torch.empty(int(size), dtype=torch.uint8)
    if mine:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(flat, source)
    return value if mine else _unpacked(flat.numpy().tobytes())
