# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a job has saved is whole, and the reader of docs/snapshot.md reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from loop_pages import blocks_of
from snapshot_cases import Drawing, batch_of, settle
from sync_cases import run

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.tools.commands import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "snapshot.md"
BLOCKS = blocks_of(PAGE.read_text(encoding="utf-8"))


def trained(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Trains three steps, saves, and returns what was trained."""

    def body(_):
        model = Drawing()
        inner = torch.optim.Adam(model.parameters(), lr=0.05)
        opt = cpudist.DistributedOptimizer(inner, model, strategy="allreduce")
        opt.resume(folder)
        for step in range(3):
            opt.zero_grad()
            model(batch_of(step, 0)).square().mean().backward()
            opt.step()
            settle(opt)
        opt.save_snapshot(name)
        found = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
        opt.close()
        return found

    return run(body, 1)[0]


@pytest.fixture
def read():
    names: dict = {}
    exec("".join(BLOCKS.values()), names)  # noqa: S102  the page's own blocks
    return names


def test_parameters_are_read_without_the_package(tmp_path, read, capsys) -> None:
    expected = trained(tmp_path, "here")
    folder = tmp_path / "here"
    tables, dense = read["read"](folder)
    assert tables == {}
    assert dense.keys() == expected.keys()
    for name, values in dense.items():
        np.testing.assert_array_equal(values, expected[name])
    assert read["check"](folder) == []
    assert Snapshot(folder).verify() == []
    assert main(["verify", str(tmp_path)]) == 0
    assert main(["diff", str(folder), str(folder)]) == 0
    assert "first.weight: equal" in capsys.readouterr().out


def test_what_a_killed_save_of_that_name_left_is_no_part_of_it(tmp_path) -> None:
    directory = Directory(tmp_path)
    folder = directory.prepare("here")
    for name in ("s001-t000-0000.safetensors", "trainer-001.json", "trainer-000.json"):
        (folder / name).write_text("{}")
    trained(tmp_path, "here")
    manifest = directory.manifest("here")
    written = {one.name for one in manifest.files}
    for one in manifest.trainers:
        written |= {one.file, one.file.replace("json", "safetensors")}
    assert {path.name for path in folder.iterdir()} == {*written, "manifest.json"}
    assert Snapshot(folder).verify() == []
