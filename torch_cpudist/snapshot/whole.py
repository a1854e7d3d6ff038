# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A table of a snapshot as one array, as a model has it whose tables are dense."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torch_cpudist import _core
from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot import merging
from torch_cpudist.snapshot.entries import Table
from torch_cpudist.snapshot.parts import Array
from torch_cpudist.snapshot.reading import Snapshot


def values_of(snapshot: Snapshot, name: str) -> Array:
    """The values of a dense parameter or of a table, in its shape.

    Raises:
        SnapshotError: there is neither of that name.
        SnapshotCorruptError: a file is not as it was written.
    """
    if any(table.name == name for table in snapshot.manifest.tables):
        return table_values(snapshot, name)
    return snapshot.dense(name)


def table_values(snapshot: Snapshot, name: str) -> Array:
    """All rows of a table, float32 ``[rows, dim]``, also those that nobody trained.

    Cost: memory for all of them.

    Raises:
        SnapshotError: there is no such table, or any int64 is a key of it.
        SnapshotCorruptError: a file is not as it was written, or a static table has
            not all of its rows.
    """
    manifest = snapshot.manifest
    table = manifest.tables[manifest.table_index(name)]
    if table.open is not None:
        raise SnapshotError(
            f"snapshot {manifest.name}: any int64 is a key of table {name!r}, of which "
            "no array has all rows. Snapshot(path).rows(table, keys) reads some."
        )
    found = np.zeros((table.rows, table.dim), np.float32)
    there = np.zeros(table.rows, np.bool_)
    layers = snapshot.layers(name)
    for run in merging.merged(layers, table.salt, ["weight"], table=name):
        if len(run.keys):
            found[run.keys] = run.columns["weight"]
            there[run.keys] = True
    if table.remote:
        absent = np.flatnonzero(~there).astype(np.int64)
        found[absent] = begun_rows(table, absent)
    elif not there.all():
        raise SnapshotCorruptError(
            f"snapshot {manifest.name} has {int(there.sum())} rows of table {name!r}, "
            f"all {table.rows} of which were in memory when it was saved. Take "
            "another snapshot.",
            table=name,
        )
    return found


def begun_rows(table: Table, keys: npt.NDArray[np.int64]) -> Array:
    """What rows of a remote table are before anybody has trained them.

    Args:
        table: remote.
        keys: int64 ``[keys]``.

    Returns:
        float32 ``[keys, dim]``.
    """
    spec = _core.TableSpec(
        table.name,
        table.rows,
        table.dim,
        remote=True,
        seed=table.seed,
        initial=list(table.initial),
        overrides=list(table.overrides),
    )
    keys = np.ascontiguousarray(keys)
    weight = np.empty((len(keys), table.dim), np.float32)
    _core.initial_rows(spec, keys.ctypes.data, len(keys), weight.ctypes.data)
    return weight
