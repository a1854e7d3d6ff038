# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``inference``: it looks up what it says, and leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import run
from exported import inference


def test_every_key_has_a_row_of_its_own() -> None:
    keys = inference.keys_of(torch.arange(5000), 5000)
    assert keys.unique().numel() == 5000
    assert 0 <= int(keys.min()) <= int(keys.max()) < 5000 * inference.SPREAD


def test_all_rows_are_measured(tmp_path) -> None:
    folder = tmp_path / "files"
    words = ["inference", "--table-rows", "3000", "--folder", str(folder)]
    rows = {row["name"]: row for row in inference.run(run.parse(words))}
    assert list(rows) == [
        "nn.Embedding",
        *(f"exported {dtype}" for dtype in ("fp32", "fp16", "bf16", "int8")),
    ]
    for name, row in rows.items():
        assert row["zipf_ns"] > 0 < row["uniform_ns"], name
    assert rows["exported int8"]["bytes"] < rows["exported fp32"]["bytes"]
    assert list(folder.iterdir()) == []


def test_unknown_rows_are_refused(tmp_path, capsys) -> None:
    assert run.main(["inference", "--rows", "fp8", "--folder", str(tmp_path)]) == 2
    assert "found ['fp8']" in capsys.readouterr().err
