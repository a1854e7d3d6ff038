# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``sweep``: every measurement, of a small table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from admission import sweep
from run import CASES, parse

ROWS = 3 * sweep.MOST_FREED


def test_every_measurement_has_figures(monkeypatch) -> None:
    monkeypatch.setattr(sweep, "ROUNDS", 2)
    monkeypatch.setattr(sweep, "UNDISTURBED", 3)
    evicting, resting, shrunk = sweep.run(
        parse(["sweep", "--table-rows", str(ROWS), "--launches", "1"])
    )
    # As many as an update may, and no more.
    assert evicting["evicted"] == sweep.MOST_FREED
    assert resting["evicted"] == 0
    assert resting["rows"] == sweep.MOST_FREED
    for row in (evicting, resting, shrunk):
        assert 0 < row["median_ms"] <= row["worst_ms"]
    assert evicting["held_ms"] == evicting["median_ms"] - resting["median_ms"]
    # But those of the last update, and the few that it has looked at itself.
    assert ROWS - 4096 < shrunk["evicted"] <= ROWS
    assert set(sweep.COLUMNS) >= set(evicting) - {"case"}
    assert CASES["sweep"] == "admission.sweep"


def test_a_table_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least"):
        list(sweep.run(parse(["sweep", "--table-rows", "70000"])))
