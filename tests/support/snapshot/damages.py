# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""All small damages of a file."""

from __future__ import annotations

from collections.abc import Iterator


def damaged(whole: bytes) -> Iterator[bytes]:
    """All files with one bit changed, all that are cut, and some that are longer."""
    contents = bytearray(whole)
    for at in range(len(contents)):
        for bit in range(8):
            contents[at] ^= 1 << bit
            yield bytes(contents)
            contents[at] ^= 1 << bit
    for size in range(len(whole)):
        yield whole[:size]
    yield whole + b"\0"
    yield whole + whole[-1:]
    yield whole * 2
