# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checksums of a file while it is still in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch_cpudist import _core
from torch_cpudist.snapshot.entries import CHUNK_BYTES


class Checksums:
    """Checksums of every chunk of pieces that come one after the other.

    Attributes:
        size: bytes that have come.
    """

    def __init__(self) -> None:
        self.size = 0
        self._found: list[int] = []
        self._running = 0

    def over(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The pieces of bytes, each of which is taken in before it is handed on."""
        for piece in pieces:
            rest = piece
            while len(rest):
                some = rest[: CHUNK_BYTES - self.size % CHUNK_BYTES]
                self._running = _core.crc32c(some, self._running)
                self.size += len(some)
                rest = rest[len(some) :]
                if self.size % CHUNK_BYTES == 0:
                    self._found.append(self._running)
                    self._running = 0
            yield piece

    @property
    def crc32c(self) -> tuple[int, ...]:
        """Of every chunk so far, the last of what is left."""
        last = (self._running,) if self.size % CHUNK_BYTES else ()
        return (*self._found, *last)


def chunk_checksums(pieces: Iterable[memoryview]) -> tuple[tuple[int, ...], int]:
    """Checksums of every chunk of the pieces one after the other, and their bytes.

    Args:
        pieces: of bytes.
    """
    checksums = Checksums()
    for _ in checksums.over(pieces):
        pass
    return checksums.crc32c, checksums.size
