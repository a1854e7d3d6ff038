# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two snapshots compared by value, however many servers wrote each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.merging import merged
from torch_cpudist.snapshot.parts import Array
from torch_cpudist.snapshot.reading import Snapshot

# Whose rows are in memory at a time, of each of the two.
_ROWS_AT_ONCE = 1 << 18


@dataclass
class Difference:
    """How one parameter differs.

    Attributes:
        name: of the parameter.
        kind: ``"table"`` or ``"dense"``.
        only_first, only_second: rows that only one of the two has.
        changed: rows or elements whose weight, state, counts or average differ.
        largest: the largest difference of a weight.
        note: why the two cannot be compared; empty if they can.
    """

    name: str
    kind: str
    only_first: int = 0
    only_second: int = 0
    changed: int = 0
    largest: float = 0.0
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether there is no difference, in any bit."""
        return not (self.only_first or self.only_second or self.changed or self.note)


def compare(first: Snapshot, second: Snapshot) -> list[Difference]:
    """Compares all tables and dense parameters; tables first, each by name.

    Raises:
        SnapshotCorruptError: a file is not as it was written.

    Cost: reads both, in bounded memory.
    """
    found = []
    for kind, names_of in (("table", _tables), ("dense", _dense)):
        one, two = names_of(first), names_of(second)
        for name in sorted(one | two):
            if name not in one or name not in two:
                where = "second" if name in two else "first"
                found.append(Difference(name, kind, note=f"only in the {where}"))
            elif kind == "table":
                found.append(_compare_table(first, second, name))
            else:
                found.append(_compare_dense(first, second, name))
    return found


def _tables(snapshot: Snapshot) -> set[str]:
    return {table.name for table in snapshot.manifest.tables}


def _dense(snapshot: Snapshot) -> set[str]:
    return {dense.name for dense in snapshot.manifest.dense}


def _table_columns(snapshot: Snapshot, name: str) -> dict[str, tuple[int, ...]]:
    table = snapshot.manifest.tables[snapshot.manifest.table_index(name)]
    columns: dict[str, tuple[int, ...]] = {"weight": (table.dim,)}
    if table.state_elements:
        columns["state"] = (table.state_elements,)
    if snapshot.manifest.average_decay:
        columns["average"] = (table.dim,)
    return columns


def _compare_table(first: Snapshot, second: Snapshot, name: str) -> Difference:
    found = Difference(name, "table")
    columns = _table_columns(first, name)
    others = _table_columns(second, name)
    if columns != others:
        found.note = f"columns {columns} in the first, {others} in the second"
        return found
    wanted = ["weight", "count", "last_seen", *list(columns)[1:]]
    steps = max(_runs(first, name), _runs(second, name))
    pairs = zip(
        _by_buckets(first, name, wanted, steps),
        _by_buckets(second, name, wanted, steps),
        strict=True,
    )
    for one, two in pairs:
        _, here, there = np.intersect1d(
            one["keys"], two["keys"], assume_unique=True, return_indices=True
        )
        found.only_first += len(one["keys"]) - len(here)
        found.only_second += len(two["keys"]) - len(here)
        differs = np.zeros(len(here), dtype=np.bool_)
        for column in wanted:
            a, b = one[column][here], two[column][there]
            apart = _differing(a, b)
            differs |= apart.any(axis=1) if apart.ndim > 1 else apart
        found.changed += int(differs.sum())
        found.largest = max(
            found.largest, _largest(one["weight"][here], two["weight"][there])
        )
    return found


def _runs(snapshot: Snapshot, name: str) -> int:
    """Into how many runs of buckets a table is cut, so that each is small."""
    layers = snapshot.layers(name)
    rows = sum(part.rows for layer in layers for part in layer.sources)
    return min(rows // _ROWS_AT_ONCE + 1, names.BUCKETS)


def _by_buckets(
    snapshot: Snapshot, name: str, wanted: list[str], steps: int
) -> Iterator[dict[str, Array]]:
    """Rows of a table a run of buckets at a time, from all files of its chain."""
    layers = snapshot.layers(name)
    salt = snapshot.manifest.tables[snapshot.manifest.table_index(name)].salt
    for step in range(steps):
        buckets = names.server_buckets(step, steps)
        (run,) = merged(layers, salt, wanted, table=name, buckets=buckets)
        # A table may have no files.
        columns = {n: run.columns.get(n, _none(snapshot, name, n)) for n in wanted}
        yield {"keys": run.keys, **columns}


def _none(snapshot: Snapshot, name: str, column: str) -> Array:
    """No rows of a column; a table may have no files."""
    if column in ("count", "last_seen"):
        return np.empty(0, np.uint32)
    width = _table_columns(snapshot, name)[column]
    return np.empty((0, *width), np.float32)


def _compare_dense(first: Snapshot, second: Snapshot, name: str) -> Difference:
    found = Difference(name, "dense")
    one, two = first.dense(name), second.dense(name)
    if one.shape != two.shape or one.dtype != two.dtype:
        found.note = (
            f"{one.dtype} {list(one.shape)} in the first, "
            f"{two.dtype} {list(two.shape)} in the second"
        )
        return found
    states, others = first.dense_state(name), second.dense_state(name)
    shapes = {part: values.shape for part, values in states.items()}
    if shapes != {part: values.shape for part, values in others.items()}:
        found.note = f"state {[*states]} in the first, {[*others]} in the second"
        return found
    pairs = [(one, two)] + [(states[part], others[part]) for part in states]
    if first.manifest.average_decay and second.manifest.average_decay:
        pairs.append((first.dense_average(name), second.dense_average(name)))
    found.changed = sum(int(_differing(a, b).sum()) for a, b in pairs)
    found.largest = _largest(one, two)
    return found


def _differing(one: Array, two: Array) -> npt.NDArray[np.bool_]:
    """Which elements differ in a bit; those that are no numbers compare, too."""
    bits = f"u{one.dtype.itemsize}"
    a, b = np.ascontiguousarray(one), np.ascontiguousarray(two)
    return np.asarray(a.view(bits) != b.view(bits))


def _largest(one: Array, two: Array) -> float:
    """The largest difference of two arrays; infinite where one of them is no number."""
    if not one.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        apart = np.abs(one.astype(np.float64) - two.astype(np.float64))
    same = (one == two) | (np.isnan(one) & np.isnan(two))
    apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
    return float(apart.max())
