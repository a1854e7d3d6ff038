# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The reader of docs/export.md reads exports and deltas, without this package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from loop_pages import blocks_of
from made_exports import USERS, write

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
READER = blocks_of(PAGE.read_text(encoding="utf-8"))["export reader", "read"]


def read(folder: Path):
    names: dict = {}
    exec(READER, names)  # noqa: S102  the page's own block
    return names["read"](folder)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
def test_the_reader_reads_what_was_exported(tmp_path, dtype) -> None:
    assert "torch_cpudist" not in READER
    rows = {key * 7: [key / 8, -key / 8, 1.0] for key in range(50)}
    days = torch.arange(12.0).reshape(4, 3)
    tensors = {"days.weight": days, "steps": torch.tensor(7)}
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    write(one, rows, tensors, dtype=dtype, tables=["days.weight"])
    rows = {key: values for key, values in rows.items() if key % 3} | {8: [2.0] * 3}
    write(two, rows, tensors, one, dtype, tables=["days.weight"])
    rows[7] = [5.0, 5.0, 5.0]
    rows[0] = [6.0, 6.0, 6.0]
    write(three, rows, tensors, two, dtype, tables=["days.weight"])
    tables, others = read(three)
    assert sorted(tables[USERS.name]) == sorted(rows)
    limit = 0.0 if dtype == "fp32" else 6 / 252
    for key, values in rows.items():
        assert np.abs(tables[USERS.name][key] - values).max() <= limit
    assert np.abs(others["days.weight"] - days.numpy()).max() <= 2 * limit
    assert sorted(others) == ["days.weight", "steps"]
    assert int(others["steps"]) == 7
