# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``pauses``: a small run, and which steps are beside a save."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from run import parse
from saves import pauses

COUNTS = {"saved": 2, "failed": 0, "skipped": 0, "pause_s_max": 0.004}


@pytest.mark.processes
def test_a_small_run_has_figures(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(pauses, "PAUSE_LIMIT_MS", 60_000.0)
    small = ["pauses", "--table-rows", "2000", "--steps", "40", "--deadline-s", "200"]
    args = parse([*small, "--folder", str(tmp_path), "--strategies", "half_async"])
    quiet, beside = pauses.run(args)
    assert not list(tmp_path.iterdir()), "nothing stays"
    assert quiet["count"] + beside["count"] == 2 * 40
    assert beside["saves"] > 0
    assert beside["problems"] == []
    for row in (quiet, beside):
        assert 0 < row["median_ms"] <= row["p999_ms"] <= row["worst_ms"]


def test_steps_are_sorted_by_saves_of_trainer_0() -> None:
    steps = [(0.0, 1.0), (1.0, 2.0), (2.0, 2.5), (3.0, 5.0)]
    first = {"steps": steps, "saves": [(1.5, 2.2), (4.0, 4.5)], "counts": COUNTS}
    other = {"steps": [(4.5, 8.0)], "saves": [], "counts": COUNTS}
    quiet, beside = pauses.figures("sync", [first, other])
    assert quiet["count"] == 1
    assert beside["count"] == 4
    assert beside["worst_ms"] == 3500
    assert beside["problems"] == [
        "p99.9 of 3500 ms is more than 100 ms above the 1000 ms without a save"
    ]
    failed = {**first, "counts": COUNTS | {"failed": 1}}
    problems = list(pauses.figures("sync", [failed]))[1]["problems"]
    assert problems[0].startswith("saves: ")


def test_a_run_without_a_step_beside_a_save_says_so() -> None:
    found = [{"steps": [(0.0, 1.0)], "saves": [], "counts": COUNTS}]
    with pytest.raises(RuntimeError, match=r"1 steps without and 0 beside .* --steps"):
        list(pauses.figures("sync", found))
