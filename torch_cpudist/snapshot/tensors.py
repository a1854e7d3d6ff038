# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The header of safetensors files: made, and read without believing it.

A file is the header's length (u64, little-endian), the header (JSON, padded with
spaces), and the data of its tensors without gaps, little-endian, row by row.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from torch_cpudist.snapshot import checked_json
from torch_cpudist.snapshot.checked_json import Malformed

#: Bytes of an element by the dtype's name in the file.
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1},
        **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2},
        **{"I32": 4, "U32": 4, "F32": 4},
        **{"F64": 8, "I64": 8, "U64": 8, "C64": 8},
    }
)
#: numpy's dtype of those that it has, by the dtype's name in the file.
NUMPY: Mapping[str, np.dtype] = MappingProxyType(
    {
        name: np.dtype(kind)
        for name, kind in {
            **{"BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2"},
            **{"F16": "<f2", "I32": "<i4", "U32": "<u4", "F32": "<f4", "F64": "<f8"},
            **{"I64": "<i8", "U64": "<u8", "C64": "<c8"},
        }.items()
    }
)
ALIGNMENT = 8
# A header is a hundred bytes for each tensor.
MOST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Stored:
    """One tensor of a file.

    Attributes:
        dtype: its name in the file, such as ``"F32"``.
        shape: its shape.
        begin: its first byte, from the beginning of the file.
        end: the byte after its last one.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What the header of a file says.

    Attributes:
        tensors: by name.
        metadata: texts by name.
        data_begin: where the header ends.
    """

    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]
    data_begin: int


def _size_bytes(dtype: str, shape: Sequence[int], where: str) -> int:
    if dtype not in ITEM_BYTES:
        raise Malformed(f"{where}: unknown dtype {dtype!r}")
    return math.prod(shape) * ITEM_BYTES[dtype]


def make_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """Lays out a file.

    The data follows in the order of ``tensors``; with those of the largest elements
    first, everything is aligned for who maps the file.

    Args:
        tensors: dtype and shape by name.
        metadata: texts by name.

    Returns:
        The bytes that come before the data, and what they say.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        spans[name] = (at, at + _size_bytes(dtype, shape, name))
        entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": list(spans[name]),
        }
        at = spans[name][1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    begin = 8 + len(text)
    stored = {
        name: Stored(
            dtype, tuple(shape), begin + spans[name][0], begin + spans[name][1]
        )
        for name, (dtype, shape) in tensors.items()
    }
    head = struct.pack("<Q", len(text)) + text
    return head, Header(stored, dict(metadata), begin)


def header_bytes(first: bytes | memoryview, file_bytes: int) -> int:
    """Bytes up to where the data begins, from the first eight of a file.

    Raises:
        Malformed: the file cannot be so short.
    """
    if len(first) < 8:
        raise Malformed(f"{file_bytes} bytes are too few for a safetensors file")
    length = int(struct.unpack("<Q", first[:8])[0])
    if not 2 <= length <= min(file_bytes - 8, MOST_HEADER_BYTES):
        raise Malformed(f"a header of {length} bytes in a file of {file_bytes}")
    return 8 + length


def _read_entry(value: object, where: str, begin: int, file_bytes: int) -> Stored:
    fields = checked_json.Fields(value, where)
    dtype = fields.text("dtype")
    shape = fields.each(
        "shape", lambda v, at: checked_json.in_range(v, at, 0, 2**63 - 1)
    )
    first, last = _two(
        fields.each(
            "data_offsets", lambda v, at: checked_json.in_range(v, at, 0, file_bytes)
        ),
        where,
    )
    fields.done()
    # Of none of them there can be so many, but beside a dimension of 0.
    most = math.prod(size or 1 for size in shape)
    if len(shape) > _MOST_DIMENSIONS or most >= 2**59:
        raise Malformed(f"{where}: a tensor of shape {list(shape)}")
    if last - first != _size_bytes(dtype, shape, where):
        raise Malformed(
            f"{where}: {last - first} bytes do not hold {dtype} {list(shape)}"
        )
    return Stored(dtype, shape, begin + first, begin + last)


def _two(values: Sequence[int], where: str) -> tuple[int, int]:
    if len(values) != 2:
        raise Malformed(f"{where}.data_offsets: expected two numbers")
    return values[0], values[1]


def read_header(contents: bytes | memoryview, file_bytes: int) -> Header:
    """Reads a header and checks all of it.

    Args:
        contents: the file up to where its data begins, at least.
        file_bytes: the size of the file.

    Raises:
        Malformed: lengths, dtypes or shapes that cannot be, tensors that overlap or
            leave gaps, data that ends before or after the file does.
    """
    begin = header_bytes(contents[:8], file_bytes)
    entries = checked_json.parse(contents[8:begin])
    if not isinstance(entries, dict):
        raise Malformed("the header is no object")
    metadata = entries.pop("__metadata__", {})
    texts = isinstance(metadata, dict) and all(
        isinstance(text, str) for text in metadata.values()
    )
    if not texts:
        raise Malformed("__metadata__: expected texts by name")
    tensors = {
        name: _read_entry(value, f"tensor {name!r}", begin, file_bytes)
        for name, value in entries.items()
    }
    at = begin
    for name, stored in sorted(tensors.items(), key=lambda t: (t[1].begin, t[1].end)):
        if stored.begin != at:
            what = "overlaps the one before" if stored.begin < at else "leaves a gap"
            raise Malformed(f"tensor {name!r} begins at {stored.begin} and {what}")
        at = stored.end
    if at != file_bytes:
        raise Malformed(f"the data ends at {at}, the file at {file_bytes}")
    return Header(tensors, metadata, begin)
