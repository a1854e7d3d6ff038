# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``load``: a server that many talk to, and what it would lose."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from patience import PATIENCE_S

# The benchmark is run as a script: its modules are found beside run.py.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import run
from cases import load, load_worker


@pytest.mark.processes
def test_a_server_under_load_keeps_its_bounds_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Others may use the machine: what depends on its speed is for the benchmark.
    monkeypatch.setattr(load, "CONNECT_LIMIT_S", 20.0)
    monkeypatch.setattr(load, "CLOSE_LIMIT_S", 10.0)
    sizes = {"seconds": 1, "clients": 6, "sockets": 60, "pushes": 20_000}
    sizes["deadline-s"] = int(PATIENCE_S)
    options = [f"--{name}={size}" for name, size in sizes.items()]
    rows = list(load.run(run.parse(["load", *options])))
    assert [row["problems"] for row in rows] == [[], [], []]
    assert all(row["verified"] for row in rows)
    assert rows[0]["pushes_per_s"] > 0


def test_a_lost_push_is_noticed() -> None:
    pushers = [
        SimpleNamespace(
            keys=np.array([rank, 7]),
            pushes=2 + rank,
            table=np.zeros((load_worker.ROWS, load_worker.DIM), np.float32),
            dense=np.full(4, -5.0, np.float32),
        )
        for rank in range(2)
    ]
    table = pushers[0].table
    table[0], table[1], table[7] = -2.0, -3.0, -5.0
    assert load.lost_pushes(pushers) == []  # type: ignore[arg-type]
    table[7] += 1
    pushers[0].dense[2] += 1
    found = load.lost_pushes(pushers)  # type: ignore[arg-type]
    assert "1 of 65536 rows" in found[0]
    assert "expected -5" in found[1]
