# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checksums of a file while it is still in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from torch_cpudist import _core
from torch_cpudist.snapshot.entries import CHUNK_BYTES


def chunk_checksums(pieces: Iterable[memoryview]) -> tuple[tuple[int, ...], int]:
    """Checksums of every chunk of the pieces one after the other, and their bytes.

    Args:
        pieces: of bytes.
    """
    found, size, running = [], 0, 0
    for piece in pieces:
        rest = piece
        while len(rest):
            some = rest[: CHUNK_BYTES - size % CHUNK_BYTES]
            running = _core.crc32c(some, running)
            size += len(some)
            rest = rest[len(some) :]
            if size % CHUNK_BYTES == 0:
                found.append(running)
                running = 0
    if size % CHUNK_BYTES:
        found.append(running)
    return tuple(found), size
