# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Exports that are made without a cluster, of tables and models that are made up."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from torch_cpudist.exports.manifest import Manifest, Table
from torch_cpudist.exports.pieces import by_bucket
from torch_cpudist.exports.reading import chain
from torch_cpudist.exports.writing import Writer, new_id
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.merging import Run
from torch_cpudist.snapshot.names import BUCKETS

USERS = Table("users.weight", 2**40, 3, 7, (("normal", 0.0, 1.0),), ((0, 1, 0.0),))


def runs_of(table: Table, rows: Mapping[int, Sequence[float]], cuts=(0, BUCKETS)):
    """Rows by key as ``add_table`` takes them."""
    keys, buckets = by_bucket(np.array(sorted(rows), dtype=np.int64), table.salt)
    found = np.array([rows[int(key)] for key in keys], dtype=np.float32)
    weight = found.reshape(len(keys), table.dim)
    for first, last in itertools.pairwise(cuts):
        here = (buckets >= first) & (buckets < last)
        layers = np.zeros(int(here.sum()), np.int64)
        columns = {"weight": weight[here]}
        yield Run(first, last, keys[here], buckets[here], layers, columns)


def write(
    path: Path,
    rows: Mapping[int, Sequence[float]],
    tensors: Mapping[str, torch.Tensor],
    base: Path | None = None,
    dtype: str = "fp32",
    table: Table = USERS,
    files: Files | None = None,
    tables: Sequence[str] = (),
    cuts: Sequence[int] = (0, 1000, BUCKETS),
) -> int:
    """Writes an export of one table; returns how many rows it has."""
    manifest = Manifest(new_id(), dtype, tables=(table,))
    system = files or Files()
    bases = () if base is None else chain(base, system)
    writer = Writer(path, manifest, system, bases)
    written = writer.add_table(0, runs_of(table, rows, tuple(cuts)))
    writer.add_model(tensors, tables)
    writer.commit()
    return written
