# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exports that are cut short, changed, or not written to their end."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from damages import damaged
from made_exports import USERS, write
from model_files import Crash, ModelFiles
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.exports import names
from torch_cpudist.exports.reading import Export
from torch_cpudist.snapshot.names import buckets_of

BASE, DELTA = Path("/models/base"), Path("/models/delta")
# Of few buckets, so that files are small.
SPAN = (100, 106)
KEYS = [
    int(key)
    for key in np.arange(20_000)
    if SPAN[0] <= buckets_of(np.array([key]), USERS.salt)[0] < SPAN[1]
][:9]
TENSORS = {"top.weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(7)}
OLD = {key: [1.0, 2.0, 3.0] for key in KEYS[:7]}
NEW = {key: [4.0, 5.0, 6.0] for key in KEYS[2:]}


def write_base(files: ModelFiles, dtype: str = "fp32") -> None:
    write(BASE, OLD, TENSORS, dtype=dtype, files=files, cuts=SPAN)


def write_delta(files: ModelFiles, path: Path = DELTA, dtype: str = "fp32") -> int:
    return write(path, NEW, TENSORS, BASE, dtype, files=files, cuts=SPAN)


class Changed(ModelFiles):
    """Files of which one has other contents."""

    def __init__(self, whole: ModelFiles) -> None:
        super().__init__()
        self.root = whole.root
        self.path = Path()
        self.contents = b""

    def size(self, path: Path) -> int | None:
        return len(self.contents) if path == self.path else super().size(path)

    def read(self, path: Path) -> bytes:
        return self.contents if path == self.path else super().read(path)

    def map(self, path: Path) -> memoryview:
        return memoryview(self.read(path))


@pytest.fixture(scope="module")
def small() -> ModelFiles:
    files = ModelFiles()
    write_base(files, "int8")
    assert write_delta(files, dtype="int8") == 7
    return files


FILES = [
    names.MANIFEST,
    names.MODEL,
    names.rows_name(0, 0),
    names.gone_name(0),
]


def test_the_export_has_no_other_files(small: ModelFiles) -> None:
    assert small.list(DELTA) == sorted(FILES)
    assert Export(DELTA, small).verify() == []


@pytest.mark.parametrize("name", FILES)
def test_every_change_of_a_file_is_found(small: ModelFiles, name: str) -> None:
    whole = small.read(DELTA / name)
    files = Changed(small)
    files.path = DELTA / name
    table = USERS.name if name.startswith("t000") else ""
    tried = 0
    for files.contents in damaged(whole):
        with pytest.raises(SnapshotCorruptError) as caught:
            Export(DELTA, files).check()
        assert (caught.value.file, caught.value.table) == (name, table)
        assert name in str(caught.value)
        tried += 1
    assert tried == 9 * len(whole) + 3 > 9 * 200


class Model(nn.Module):
    """As the export's."""

    def __init__(self) -> None:
        super().__init__()
        with cpudist.remote_tables(min_rows=1):
            self.users = nn.Embedding(USERS.rows, USERS.dim)
        self.top = nn.Linear(3, 2, bias=False)
        self.register_buffer("steps", torch.tensor(0))


def write_on_disk(folder: Path, dtype: str = "fp32") -> None:
    write(folder / "base", OLD, TENSORS, dtype=dtype, cuts=SPAN)
    write(folder / "delta", NEW, TENSORS, folder / "base", dtype, cuts=SPAN)


def test_a_lookup_says_which_file_is_damaged(tmp_path) -> None:
    write_on_disk(tmp_path, "fp16")
    place = tmp_path / "base" / names.rows_name(0, 0)
    whole = place.read_bytes()
    generator = random.Random(4)
    for _ in range(40):
        contents = bytearray(whole)
        contents[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        place.write_bytes(contents)
        model = Model()
        with pytest.raises(SnapshotCorruptError) as caught:
            with cpudist.load_for_inference(model, tmp_path / "base"):
                model.users(torch.tensor(KEYS))
        assert caught.value.file == place.name
    place.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
def test_a_delta_that_is_damaged_changes_nothing(tmp_path, name) -> None:
    write_on_disk(tmp_path)
    model = Model()
    place = tmp_path / "delta" / name
    whole = place.read_bytes()
    generator = random.Random(name)
    with cpudist.load_for_inference(model, tmp_path / "base") as reader:
        before = reader.loaded, model.users(torch.tensor(KEYS)).detach().clone()
        for _ in range(10):
            contents = bytearray(whole)
            contents[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
            place.write_bytes(contents)
            with pytest.raises(SnapshotCorruptError, match=name):
                reader.apply_delta(tmp_path / "delta")
            assert reader.loaded == before[0]
            assert torch.equal(model.users(torch.tensor(KEYS)), before[1])
        place.write_bytes(whole)
        reader.apply_delta(tmp_path / "delta")
        found = model.users(torch.tensor(KEYS[2:]))
        assert (found == torch.tensor([4.0, 5.0, 6.0])).all()


def stopping(count: int, error: BaseException):
    """Raises at one call that changes something, after a crash at all that follow."""
    calls = {"made": 0}

    def before(name: str, changes: bool) -> None:
        if changes:
            calls["made"] += 1
            crashed = isinstance(error, Crash) and calls["made"] > count
            if calls["made"] == count or crashed:
                raise error

    return before, calls


@pytest.fixture
def begun() -> ModelFiles:
    files = ModelFiles()
    write_base(files)
    return files.settled()


def check(files: ModelFiles) -> bool:
    """The base is whole, and the delta is there as a whole or is none."""
    assert Export(BASE, files).verify() == []
    try:
        found = Export(DELTA, files)
    except SnapshotCorruptError:
        raise
    except SnapshotError:
        return False
    assert found.verify() == []
    (rows, gone) = found.rows_files(0)
    assert sorted(rows.column("keys").tolist()) == sorted(NEW)
    assert sorted(gone.column("keys").tolist()) == sorted(set(OLD) - set(NEW))
    return True


def test_a_crash_at_every_call_leaves_an_export_or_none(begun: ModelFiles) -> None:
    generator = random.Random(5)
    choices = [lambda options: options[0], lambda options: options[1], generator.choice]
    files = begun.settled()
    files.before, calls = stopping(-1, OSError())
    write_delta(files)
    total = calls["made"]
    assert total > 20
    there = set()
    for count in range(1, total + 1):
        files = begun.settled()
        files.before, _ = stopping(count, Crash())
        with pytest.raises(Crash):
            write_delta(files)
        for choose in choices:
            left = files.after_crash(choose)
            there.add(check(left))
            if not check(left):
                write_delta(left)  # the same call again
            assert check(left)
    assert there == {True, False}


def test_an_error_of_every_call_is_said(begun: ModelFiles) -> None:
    files = begun.settled()
    files.before, calls = stopping(-1, OSError())
    write_delta(files)
    for count in range(1, calls["made"] + 1):
        files = begun.settled()
        full = OSError(errno.ENOSPC, "No space left on device")
        files.before, _ = stopping(count, full)
        with pytest.raises(SnapshotError, match="No space left on device"):
            write_delta(files)
        files.before = lambda name, changes: None
        if not check(files):
            write_delta(files)
        assert check(files)
