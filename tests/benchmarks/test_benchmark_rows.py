# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``rows``: every measurement, of a small table."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from cases import rows
from run import parse


def test_every_measurement_has_figures(monkeypatch) -> None:
    monkeypatch.setattr(rows, "PULLS", 3)
    monkeypatch.setattr(rows, "BATCHES", 2)
    args = parse(["rows", "--table-rows", "5000", "--wrapped-rows", "3000"])
    grown, gathered, pulled, *wrapped = rows.run(args)
    # A row has at least its key, two counts, 16 weights and a sum.
    assert grown["bytes_per_row"] >= 16 + 4 * 17
    for row in (grown, gathered, pulled):
        assert 0 < row["median_ms"] <= row["p999_ms"] <= row["worst_ms"]
        assert row["ns_per_row"] > 0
        assert row["rows"] == 5000
    assert len({row["name"] for row in wrapped}) == len(wrapped) == 4
    for row in wrapped:
        assert row["rows"] == 3000
        assert row["seconds"] > 0
