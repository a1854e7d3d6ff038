# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Snapshots that earlier releases wrote, which are read for ever.

Those of a format are never changed; a release that writes another one adds its own.
`python tests/snapshot/test_formats.py FOLDER` writes those of today.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import small_chains
import torch
from small_snapshots import commit, row_values, trainer_tree

from torch_cpudist.settings.admission import CountFilter
from torch_cpudist.settings.eviction import Evict
from torch_cpudist.settings.open_table import OpenTable
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.manifest import OPEN_FORMAT, StateSlice, Version
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.tools.commands import main

ZOO = Path(__file__).resolve().parents[1] / "snapshots"
NAME = "snap-000000000012-5f3a"
KEYS = (0, 1, 7, 2**39)
ANY_KEYS = (-3, 2**62 + 1, -(2**63), -1, 0, 2**54, 2**63 - 1)
TOLD = OpenTable(
    "zeros", None, CountFilter(3, 1 << 20), Evict(1000, 3600.5, 4, 2**40, "lfu")
)


@pytest.mark.parametrize("number", range(1, OPEN_FORMAT + 1))
def test_every_format_is_there(number) -> None:
    assert (ZOO / f"format-{number}" / NAME / "manifest.json").exists()


def test_format_1() -> None:
    snapshot = Snapshot(ZOO / "format-1" / NAME)
    manifest = snapshot.manifest
    assert snapshot.verify() == []
    assert manifest.version == Version(12, 2**60, 24)
    assert (manifest.strategy, manifest.options) == ("Sync", {"average": "samples"})
    assert (manifest.number, manifest.servers, manifest.commit) == (12, 1, 1)
    (table,) = manifest.tables
    assert (table.name, table.rows, table.dim) == ("users.weight", 2**40, 4)
    assert (table.remote, table.seed, table.step) == (True, 2**63 + 5, 12)
    assert table.initial == (("normal", 0.0, 0.01),)
    assert table.overrides == ((0, 1, 0.0),)
    assert table.state == (StateSlice("sum", 0, 4),)
    assert table.rule.kind == "adagrad"
    assert table.rule.options == {"lr": 0.1, "eps": 1e-10, "nesterov": False}
    keys = np.array([*KEYS, 8])
    rows = snapshot.rows("users.weight", keys)
    assert rows.found.tolist() == [True, True, True, True, False]
    for name, salt in (("weight", 0.5), ("state", 0.25), ("average", 0.125)):
        expected = row_values(np.array(KEYS), 4, salt)
        np.testing.assert_array_equal(rows.columns[name][:4], expected)
    assert rows.columns["count"][:4].tolist() == [key % 7 for key in KEYS]
    assert rows.columns["last_seen"][:4].tolist() == [key % 11 for key in KEYS]
    weight = np.arange(12, dtype=np.float32).reshape(3, 4) / 64
    np.testing.assert_array_equal(snapshot.dense("top.weight"), weight)
    np.testing.assert_array_equal(snapshot.dense_average("top.weight"), weight / 2)
    state = snapshot.dense_state("top.weight")
    np.testing.assert_array_equal(state["exp_avg_sq"], weight + 2)
    np.testing.assert_array_equal(snapshot.dense("top.bias"), 1 + np.arange(3) / 64)
    assert manifest.average_decay == 0.5
    assert manifest.param_groups == ({"lr": 0.1, "betas": [0.9, 0.999]},)
    (trainer,) = manifest.trainers
    assert (trainer.rank, trainer.steps) == (0, 10)
    tree, expected = snapshot.trainer(0), trainer_tree(0)
    assert tree["rank"] == 0
    assert tree["position"] == (3, [1.5, None])
    assert torch.equal(tree["generator"], expected["generator"])
    assert tree["buffers"]["mean"].dtype is torch.bfloat16
    assert tree["numpy"].tolist() == expected["numpy"].tolist()


def test_format_2() -> None:
    """A chain of one of format 1 and two of format 2."""
    snapshot = Snapshot(ZOO / "format-2" / small_chains.NAMES[2])
    assert snapshot.verify() == []
    names = [one.manifest.name for one in snapshot.members]
    assert names == list(reversed(small_chains.NAMES))
    assert [one.manifest.base is None for one in snapshot.members] == [
        *(False, False, True)
    ]
    for member, gone in zip(snapshot.members, reversed(small_chains.GONE), strict=True):
        assert sorted(member.gone(small_chains.TABLE)) == sorted(gone)
    keys = np.array(sorted(small_chains.NEWEST))
    rows = snapshot.rows(small_chains.TABLE, [*keys, 36])
    assert rows.found.tolist() == [True] * len(keys) + [False]
    found = rows.columns["weight"][:-1]
    np.testing.assert_array_equal(found, small_chains.weights_of(keys))
    assert rows.columns["count"][:-1].tolist() == [key % 7 for key in keys]
    assert snapshot.manifest.number == 14
    assert snapshot.trainer(0)["rank"] == 0


def test_format_3() -> None:
    """Tables of any key: all rows, and what has changed since and gone."""
    snapshot = Snapshot(ZOO / "format-3" / small_chains.NAMES[1])
    assert snapshot.verify() == []
    changed, whole = snapshot.members
    assert (whole.manifest.base, changed.manifest.base.name) == (None, NAME)
    for member in (changed, whole):
        (table,) = member.manifest.tables
        assert (table.rows, table.remote, table.open) == (2**54, True, TOLD)
    assert sorted(changed.gone("users.weight")) == sorted(ANY_KEYS[:2])
    rows = snapshot.rows("users.weight", [*ANY_KEYS, 7, 5])
    assert rows.found.tolist() == [False] * 2 + [True] * (len(ANY_KEYS) - 1) + [False]
    expected = row_values(np.array(ANY_KEYS[2:]), 4, 0.5)
    np.testing.assert_array_equal(rows.columns["weight"][2:-2], expected)


@pytest.mark.parametrize("number", range(1, OPEN_FORMAT + 1))
def test_the_commands_read_every_format(number, capsys) -> None:
    folder = str(ZOO / f"format-{number}")
    assert main(["verify", folder]) == 0
    assert main(["list", folder]) == 0
    assert main(["rows", folder, "users.weight", "0"]) == 0
    assert NAME in capsys.readouterr().out


def write_all(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    how = {"servers": 1, "trainers": 1}
    commit(Directory(folder / "format-1"), NAME, tables={"users.weight": KEYS}, **how)
    small_chains.write_chain(Directory(folder / "format-2"), **how)
    how = {**how, "opened": TOLD}
    opened = Directory(folder / "format-3")
    base = commit(opened, NAME, tables={"users.weight": ANY_KEYS}, **how)
    changes = {"tables": {"users.weight": (7,)}, "gone": {"users.weight": ANY_KEYS[:2]}}
    name = small_chains.NAMES[1]
    commit(opened, name, number=13, base=base, **changes, **how)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
