# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exports that earlier releases wrote, which are loaded for ever.

Those of a format are never changed; a release that writes another one adds its own.
`python tests/exports/test_export_formats.py FOLDER` writes those of today.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_exports import write
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.exports.manifest import OPEN_FORMAT, Table
from torch_cpudist.exports.reading import Export

ZOO = Path(__file__).resolve().parents[1] / "snapshots"
DTYPES = ("fp32", "fp16", "bf16", "int8")
TABLE = Table("users.weight", 2**40, 3, 7, (("fill", 3.0, 0.0),), ())
# Of few buckets, so that files are small.
SPAN = (100, 106)
KEYS = (44, 81, 508, 1694)
OLD = {key: [1.0, 0.5, float(key % 5)] for key in KEYS}
NEW = {key: [2.0, 0.5, float(key % 5)] for key in KEYS[1:]}
TENSORS = {"top.weight": torch.arange(6.0).reshape(2, 3) / 8, "steps": torch.tensor(7)}


# Of the same few buckets.
ANY_KEYS = (-3635, -297, 4611686018427388885, -9223372036854774157)
ANY_OLD = {key: [1.0, 0.5, float(key % 5)] for key in ANY_KEYS}
ANY_NEW = {key: [2.0, 0.5, float(key % 5)] for key in ANY_KEYS[1:]}
# By format.
ROWS = {
    1: (TABLE, OLD, NEW),
    2: (replace(TABLE, rows=2**54, open=True), ANY_OLD, ANY_NEW),
}


class Model(nn.Module):
    """As those that were exported."""

    def __init__(self, number: int) -> None:
        super().__init__()
        if number == OPEN_FORMAT:
            self.users: nn.Embedding = cpudist.Embedding(TABLE.dim)
        else:
            with cpudist.remote_tables(min_rows=1):
                self.users = nn.Embedding(TABLE.rows, TABLE.dim)
        self.top = nn.Linear(3, 2, bias=False)
        self.register_buffer("steps", torch.tensor(0))


def write_all(folder: Path) -> None:
    """What a release adds."""
    for number, (table, old, new) in ROWS.items():
        for dtype in DTYPES:
            base = folder / f"export-{number}" / f"{dtype}-base"
            delta = base.with_name(f"{dtype}-delta")
            for path, rows, before in ((base, old, None), (delta, new, base)):
                write(path, rows, TENSORS, before, dtype, table=table, cuts=SPAN)


@pytest.mark.parametrize("number", range(1, OPEN_FORMAT + 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_is_loaded(number, dtype) -> None:
    folder = ZOO / f"export-{number}"
    model = Model(number)
    _, old, new = ROWS[number]
    ids = torch.tensor(list(old))
    for name in ("base", "delta"):
        assert Export(folder / f"{dtype}-{name}").verify() == []
    with (
        cpudist.load_for_inference(model, folder / f"{dtype}-base") as reader,
        torch.no_grad(),
    ):
        expected = torch.tensor(list(old.values()))
        torch.testing.assert_close(model.users(ids), expected, rtol=0.01, atol=0.02)
        reader.apply_delta(folder / f"{dtype}-delta")
        found = model.users(ids)
        expected = torch.tensor(list(new.values()))
        torch.testing.assert_close(found[1:], expected, rtol=0.01, atol=0.02)
        assert found[0].tolist() == [3.0, 3.0, 3.0]  # gone: as the table began
        assert torch.equal(model.top.weight, TENSORS["top.weight"])
        assert int(model.steps) == 7


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
