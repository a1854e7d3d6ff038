# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Headers of safetensors files: others read ours, and none is believed."""

from __future__ import annotations

import json
import random
import struct

import numpy as np
import pytest
from small_snapshots import NAME, commit, trainer_tree

from torch_cpudist.snapshot.checked_json import Malformed
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.tensors import (
    ITEM_BYTES,
    header_bytes,
    make_header,
    read_header,
)
from torch_cpudist.snapshot.trees import TORCH


def file_of(entries: object, data: bytes = b"", pad: int = 0) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text += b" " * pad
    return struct.pack("<Q", len(text)) + text + data


def tensor(begin: int, end: int, shape: object = (1,), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_is_written_is_read() -> None:
    tensors = {
        name: (dtype, shape)
        for name, dtype, shape in [
            ("a", "F64", (2, 3)),
            ("none", "I32", (0, 7)),
            ("one", "BF16", ()),
            ("größe", "BOOL", (3,)),
        ]
    }
    head, made = make_header(tensors, {"format": "x"})
    assert len(head) % 8 == 0
    size = len(head) + 48 + 0 + 2 + 3
    assert header_bytes(head[:8], size) == len(head)
    assert read_header(head, size) == made
    assert made.tensors["a"].begin == len(head)
    assert made.tensors["größe"].end == size


def test_dtypes_have_the_sizes_that_torch_gives_them() -> None:
    assert TORCH.keys() == ITEM_BYTES.keys()
    for name, dtype in TORCH.items():
        assert dtype.itemsize == ITEM_BYTES[name], name


ONE = json.dumps(tensor(0, 4)).encode()
MALFORMED = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "no header": struct.pack("<Q", 0),
    "longer than the file": struct.pack("<Q", 100) + b"{}",
    "huge": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": file_of(b"{]"),
    "no UTF-8": file_of(b'{"\xff": 1}'),
    "no object": file_of([]),
    "data of nobody": file_of({}, b"1234"),
    "a name twice": file_of(b'{"a": %s, "a": %s}' % (ONE, ONE), b"1234"),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}}),
    "metadata of nothing": file_of({"__metadata__": None}),
    "no entry": file_of({"a": 1}, b"1234"),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"),
    "more fields": file_of({"a": {**tensor(0, 4), "x": 1}}, b"1234"),
    "unknown dtype": file_of({"a": tensor(0, 4, dtype="F31")}, b"1234"),
    "another size": file_of({"a": tensor(0, 4, [2])}, b"1234"),
    "negative shape": file_of({"a": tensor(0, 4, [-1, -1])}, b"1234"),
    "shape of floats": file_of({"a": tensor(0, 4, [1.0])}, b"1234"),
    "shape of truth": file_of({"a": tensor(0, 4, [True])}, b"1234"),
    "overflow": file_of({"a": tensor(0, 4, [2**62, 4, 2**62])}, b"1234"),
    "huge but for a 0": file_of({"a": tensor(0, 0, [2**62, 0])}),
    "huge by its product": file_of({"a": tensor(0, 0, [2**40, 2**20, 0])}),
    "many dimensions": file_of({"a": tensor(0, 4, [1] * 65)}, b"1234"),
    "three offsets": file_of(
        {"a": {**tensor(0, 4), "data_offsets": [0, 4, 4]}}, b"1234"
    ),
    "backwards": file_of({"a": tensor(4, 0)}, b"1234"),
    "beyond the end": file_of({"a": tensor(0, 8, [2])}, b"1234"),
    "a gap": file_of({"a": tensor(4, 8)}, b"12345678"),
    "an overlap": file_of({"a": tensor(0, 8, [2]), "b": tensor(4, 8)}, b"12345678"),
    "the same twice": file_of({"a": tensor(0, 4), "b": tensor(0, 4)}, b"1234"),
    "a rest": file_of({"a": tensor(0, 4)}, b"12345"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_headers_that_cannot_be_are_refused(name) -> None:
    contents = MALFORMED[name]
    with pytest.raises(Malformed):
        read_header(contents, len(contents))


def test_the_cases_fail_for_what_they_say() -> None:
    for entries, data in [
        ({}, b""),
        ({"a": tensor(0, 4)}, b"1234"),
        ({"a": tensor(0, 4), "b": tensor(4, 8)}, b"12345678"),
        ({"b": tensor(4, 8), "a": tensor(0, 4)}, b"12345678"),
        ({"a": tensor(0, 4), "e": tensor(4, 4, [0])}, b"1234"),
    ]:
        contents = file_of(entries, data, pad=5)
        assert read_header(contents, len(contents)).tensors.keys() == entries.keys()


def test_changed_headers_never_lead_outside_of_the_file() -> None:
    head, _ = make_header({"keys": ("I64", (3,)), "weight": ("F32", (3, 2))}, {})
    whole = bytearray(head + bytes(48))
    generator = random.Random(11)
    read = 0
    for _ in range(20_000):
        contents = bytearray(whole)
        for _ in range(generator.randrange(1, 4)):
            contents[generator.randrange(len(head))] = generator.randrange(256)
        try:
            header = read_header(contents, len(contents))
        except Malformed:
            continue
        read += 1
        for stored in header.tensors.values():
            assert header.data_begin <= stored.begin <= stored.end <= len(contents)
    assert 0 < read < 10_000  # names may be others


def test_others_read_what_is_written_here(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    of_torch = pytest.importorskip("safetensors.torch")
    directory = Directory(tmp_path)
    commit(directory, tables={"users.weight": range(300)})
    snapshot = Snapshot(directory.folder(NAME))
    rows = 0
    for part in snapshot.parts("users.weight"):
        read = safetensors.load_file(directory.folder(NAME) / part.file.name)
        assert {*part.columns, "bucket_begin"} == read.keys()
        for column in part.columns:
            assert read[column].dtype == part.column(column).dtype
            np.testing.assert_array_equal(read[column], part.column(column))
        np.testing.assert_array_equal(read["bucket_begin"], part.bucket_begin())
        rows += len(read["keys"])
    assert rows == 300
    dense = safetensors.load_file(directory.folder(NAME) / "s001-dense.safetensors")
    np.testing.assert_array_equal(
        dense["top.weight.block1.weight"],
        snapshot.dense("top.weight").reshape(-1)[8:],
    )
    own = of_torch.load_file(directory.folder(NAME) / "trainer-001.safetensors")
    expected = trainer_tree(1)
    assert len(own) == 3
    assert any(one.equal(expected["buffers"]["mean"]) for one in own.values())
    assert any(one.equal(expected["generator"]) for one in own.values())
