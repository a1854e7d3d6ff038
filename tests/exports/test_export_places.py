# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where exports go: never over what somebody else has there."""

from __future__ import annotations

import os
import tracemalloc

import pytest
import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.errors import InvalidArgumentError, SnapshotError
from torch_cpudist.exports import names
from torch_cpudist.exports.reading import Export


@pytest.mark.parametrize(
    "name",
    [names.MODEL, names.rows_name(0, 0), names.MODEL + ".tmp", "config.json"],
)
def test_files_of_others_stay(tmp_path, name) -> None:
    path = tmp_path / "models" / name
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(SnapshotError, match="other files in it"):
        cpudist.export(nn.Linear(2, 2), path.parent)
    assert os.listdir(path.parent) == [name]
    assert path.read_text() == "precious"


def test_what_was_not_written_to_its_end_is_written_again(tmp_path) -> None:
    for left in (
        [names.BEGUN + ".tmp"],
        [names.BEGUN, names.MODEL, "t000-0000.safetensors.tmp"],
    ):
        folder = tmp_path / str(len(left))
        folder.mkdir()
        for name in left:
            (folder / name).write_bytes(b"x")
        model = nn.Linear(2, 2)
        cpudist.export(model, folder)
        assert sorted(os.listdir(folder)) == [names.MANIFEST, names.MODEL]
        assert Export(folder).verify() == []
    (folder / names.MANIFEST).rename(folder / "other.json")
    (folder / names.BEGUN).write_bytes(b"x")
    with pytest.raises(SnapshotError, match=r"other\.json"):
        cpudist.export(model, folder)


def test_urls_and_files_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    cpudist.export(model, "one")
    for call in (
        lambda: cpudist.export(model, "s3://bucket/model"),
        lambda: cpudist.export(model, "two", base="s3://bucket/model"),
        lambda: cpudist.load_for_inference(model, "hdfs://host/model"),
        lambda: cpudist.export(model, ""),
        lambda: cpudist.export(model, None),
    ):
        with pytest.raises(InvalidArgumentError, match=r"URL|directory of an export"):
            call()
    (tmp_path / "file").write_text("x")
    with pytest.raises(SnapshotError, match="is a file"):
        cpudist.export(model, "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "one"]


def test_links_are_followed_when_a_delta_is_made(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    os.mkdir("elsewhere")
    os.mkdir("sub")
    cpudist.export(first, "one")
    cpudist.export(second, "other")
    os.symlink("one", "current")
    cpudist.export(second, "sub/../two", base="current")
    os.unlink("current")
    os.symlink("other", "current")
    os.symlink("../two", "elsewhere/newest")
    for path in ("two", "elsewhere/newest"):
        model = nn.Linear(2, 2)
        with cpudist.load_for_inference(model, path):
            assert torch.equal(model.weight, second.weight)
    assert Export("two").manifest.base.name == "one"
    with pytest.raises(InvalidArgumentError, match="beside"):
        cpudist.export(second, "elsewhere/three", base="one")


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_a_model_is_written_one_tensor_after_the_other(tmp_path, dtype) -> None:
    tables = [nn.Embedding(1 << 14, 32, sparse=True) for _ in range(12)]
    whole = sum(table.weight.nbytes for table in tables)
    tracemalloc.start()
    try:
        cpudist.export(nn.ModuleList(tables), tmp_path / "out", dtype)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < whole / 8
