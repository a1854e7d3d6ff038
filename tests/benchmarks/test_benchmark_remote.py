# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``remote``: every way to look up, of a small table."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from cases import remote
from run import parse


def test_every_way_to_look_up_has_figures_and_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "BATCHES", 2)
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    args = parse(["remote", "--table-rows", "5000", "--launches", "1"])
    rows = {row["name"]: row for row in remote.run(args)}
    assert len(rows) == 7
    assert rows[remote.REFERENCE]["ratio"] == 1
    for row in rows.values():
        assert row["verified"], row
        assert 0 < row["us_min"] <= row["us"] <= row["us_max"]
        assert row["ratio"] > 0
        assert row["rows"] == 5000
    # One core and one thread were for the case only.
    assert os.sched_getaffinity(0) == allowed
    assert torch.get_num_threads() == threads


def test_a_row_with_other_bits_is_told() -> None:
    ids = torch.tensor([1, 0])
    values = torch.arange(4.0).view(2, 2)
    lookups = {
        remote.REFERENCE: lambda ids: values[ids],
        "same": lambda ids: values[ids].clone(),
        "other": lambda ids: values[ids] + 1,
    }
    assert remote.differing(lookups, [ids]) == {"other"}
