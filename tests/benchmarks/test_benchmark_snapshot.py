# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``snapshot``: every measurement, of a small table."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from run import parse
from saves import snapshot


def test_every_measurement_has_figures(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(snapshot, "BATCHES", 2)
    monkeypatch.setattr(snapshot, "RATIO_LIMIT", 0.0)
    monkeypatch.setattr(snapshot, "PAUSE_LIMIT_MS", 60_000.0)
    small = ["snapshot", "--table-rows", "20000", "--launches", "2", "--steps", "300"]
    args = parse([*small, "--folder", str(tmp_path), "--strategies", "sync,async"])
    rows = list(snapshot.run(args))
    assert not list(tmp_path.iterdir()), "nothing stays"
    for found in (rows[:5], rows[5:]):
        quiet, beside, raw, idle, training = found
        for steps in (quiet, beside):
            assert 0 < steps["median_ms"] <= steps["p999_ms"] <= steps["worst_ms"]
            assert steps["rows"] == 20_000
        assert not any("was not made" in one for one in beside["problems"])
        # 17 values, a key and two counts a row.
        for writes in (raw, idle, training):
            assert writes["count"] == 2
            assert writes["mb"] * 1e6 > 20_000 * (17 * 4 + 16)
        assert raw["ratio"] == 1
        assert idle["verified"]
        assert idle["cpu_s"] > 0
        assert training["verified"]


def test_each_save_is_judged_by_the_plain_write_of_its_round() -> None:
    args = parse(["snapshot"])
    seen = snapshot.Seen(
        quiet=[0.001],
        beside=[0.001],
        raw=[9.0, 1.0, 1.0],
        raw_cpu=[1.0],
        idle=[9.0, 1.0, 1.0],
        idle_cpu=[1.0],
        training=[2.0, 2.0, 2.0],
        size_bytes=10**6,
    )
    idle, training = list(snapshot.figures(args, "sync", seen))[3:]
    assert idle["verified"]
    assert training["ratio"] == 0.5
    assert not training["verified"]
    assert "ratio 0.50, expected 0.7" in training["problems"]
    # One that failed takes the plain write of its own round away, and no other one's.
    seen.training = [None, 1.0, 1.0]
    training = list(snapshot.figures(args, "sync", seen))[4]
    assert (training["ratio"], training["count"]) == (1.0, 2)
    assert training["problems"] == ["2 of 3 saves were made"]
    assert not training["verified"]
    seen.training = [None, None, None]
    training = list(snapshot.figures(args, "sync", seen))[4]
    assert training["problems"] == ["0 of 3 saves were made"]
