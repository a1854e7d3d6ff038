# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The checksum of whatever lends its memory."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from torch_cpudist import _core

DIGITS = b"123456789"
CHECK = 0xE3069283  # of the digits, as published


@pytest.mark.parametrize(
    "lend",
    [
        bytes,
        bytearray,
        memoryview,
        lambda data: np.frombuffer(data, dtype=np.uint8),
        lambda data: np.frombuffer(data, dtype=np.uint8).reshape(3, 3),
        lambda data: memoryview(b"0" + data + b"0")[1:-1],
    ],
)
def test_everything_that_lends_memory(lend) -> None:
    assert _core.crc32c(lend(DIGITS)) == CHECK


def test_a_mapped_file(tmp_path) -> None:
    (tmp_path / "file").write_bytes(DIGITS)
    with open(tmp_path / "file", "rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert _core.crc32c(mapped) == CHECK
        # Nothing of it was held on to, or closing it would have failed.


def test_it_goes_on_from_what_stands_before() -> None:
    assert _core.crc32c(b"") == 0
    for at in range(len(DIGITS) + 1):
        assert _core.crc32c(DIGITS[at:], _core.crc32c(DIGITS[:at])) == CHECK
    assert _core.crc32c(data=DIGITS[1:], begin=_core.crc32c(DIGITS[:1])) == CHECK


def test_what_lends_none() -> None:
    with pytest.raises(BufferError):
        _core.crc32c(memoryview(DIGITS)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        _core.crc32c(np.zeros((4, 4))[:, 1])
    for other in (None, 3, "text", [1, 2]):
        with pytest.raises(TypeError):
            _core.crc32c(other)
    with pytest.raises(TypeError):
        _core.crc32c(DIGITS, -1)
