# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exports that earlier releases wrote, which are loaded for ever.

Those of a format are never changed; a release that writes another one adds its own.
`python tests/exports/test_export_formats.py FOLDER` writes those of today.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from made_exports import write
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.exports.manifest import FORMAT, Table
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


class Model(nn.Module):
    """As those that were exported."""

    def __init__(self) -> None:
        super().__init__()
        with cpudist.remote_tables(min_rows=1):
            self.users = nn.Embedding(TABLE.rows, TABLE.dim)
        self.top = nn.Linear(3, 2, bias=False)
        self.register_buffer("steps", torch.tensor(0))


def write_all(folder: Path) -> None:
    """What a release adds."""
    for dtype in DTYPES:
        base, delta = folder / f"{dtype}-base", folder / f"{dtype}-delta"
        for path, rows, before in ((base, OLD, None), (delta, NEW, base)):
            write(path, rows, TENSORS, before, dtype, table=TABLE, cuts=SPAN)


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_is_loaded(number, dtype) -> None:
    folder = ZOO / f"export-{number}"
    model = Model()
    ids = torch.tensor(KEYS)
    for name in ("base", "delta"):
        assert Export(folder / f"{dtype}-{name}").verify() == []
    with (
        cpudist.load_for_inference(model, folder / f"{dtype}-base") as reader,
        torch.no_grad(),
    ):
        expected = torch.tensor(list(OLD.values()))
        torch.testing.assert_close(model.users(ids), expected, rtol=0.01, atol=0.02)
        reader.apply_delta(folder / f"{dtype}-delta")
        found = model.users(ids)
        expected = torch.tensor(list(NEW.values()))
        torch.testing.assert_close(found[1:], expected, rtol=0.01, atol=0.02)
        assert found[0].tolist() == [3.0, 3.0, 3.0]  # gone: as the table began
        assert torch.equal(model.top.weight, TENSORS["top.weight"])
        assert int(model.steps) == 7


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
