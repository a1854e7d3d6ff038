# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows over a chain: the newest of each key, none that is gone, in order of files."""

from __future__ import annotations

import numpy as np
import pytest
from small_snapshots import NAME, columns_of, commit, table

from torch_cpudist.errors import SnapshotCorruptError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.merging import Layer, merged
from torch_cpudist.snapshot.reading import Snapshot

OF = table()


class Rows:
    """Made-up rows, whose weight says of which layer they are."""

    def __init__(self, keys, layer: float) -> None:
        found = columns_of(np.array(sorted(keys), np.int64), OF, False)
        self._columns = found | {"weight": np.full((len(keys), OF.dim), layer)}
        self.rows = len(keys)

    def bucket_begin(self):
        return self._columns["bucket_begin"]

    def column(self, name, begin=0, end=None):
        return self._columns[name][begin:end]


def answer(layers: list[tuple[set[int], set[int]]]) -> dict[int, int]:
    """Which layer each key is of, by the definition."""
    found: dict[int, int] = {}
    for number, (keys, gone) in enumerate(layers):
        found = {key: at for key, at in found.items() if key not in gone}
        found |= dict.fromkeys(keys, number)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_the_newest_row_wins_and_gone_keys_are_left_out(seed: int) -> None:
    draw = np.random.default_rng(seed)
    layers, given = [], []
    for number in range(draw.integers(0, 5)):
        keys = set(draw.integers(0, 300, draw.integers(0, 120)).tolist())
        gone = set(draw.integers(0, 300, draw.integers(0, 60)).tolist())
        layers.append((keys, gone))
        left = {key for key in keys if key % 2}
        sources = [Rows(left, number), Rows(keys - left, number)]
        unordered = draw.permutation(np.array(list(gone), np.int64))
        given.append(Layer(sources, unordered))
    runs = list(merged(given, OF.salt, rows_at_once=int(draw.integers(1, 200))))
    assert [run.first for run in runs] == [0, *(run.last for run in runs[:-1])]
    assert runs[-1].last == names.BUCKETS
    keys = np.concatenate([run.keys for run in runs])
    expected = answer(layers)
    in_order = columns_of(np.array(sorted(expected), np.int64), OF, False)["keys"]
    assert keys.tolist() == in_order.tolist()
    numbers = [expected[key] for key in keys.tolist()]
    assert np.concatenate([run.layers for run in runs]).tolist() == numbers
    for run in runs:
        assert (run.buckets == names.buckets_of(run.keys, OF.salt)).all()
        assert run.first <= run.buckets.min(initial=run.first)
        assert run.buckets.max(initial=run.first) < run.last
        if layers:
            weight = run.columns["weight"]
            assert (weight == run.layers[:, None]).all()


def test_two_rows_of_a_key_in_one_layer_are_refused() -> None:
    layer = Layer([Rows({1, 2}, 0), Rows({2, 3}, 0)])
    with pytest.raises(SnapshotCorruptError, match="more than one row of key 2") as e:
        list(merged([layer], OF.salt, table="users.weight"))
    assert e.value.table == "users.weight"


def test_parts_of_a_snapshot_are_layers(tmp_path) -> None:
    directory = Directory(tmp_path)
    commit(directory, tables={OF.name: range(0, 900, 3)}, servers=3, part_rows=40)
    snapshot = Snapshot(directory.folder(NAME))
    layer = Layer(list(snapshot.parts(OF.name)), np.array([3, 4], np.int64))
    wanted = ("weight", "state", "count", "last_seen", "average")
    runs = list(merged([layer], OF.salt, wanted, rows_at_once=50))
    assert len(runs) > 3
    expected = columns_of(np.arange(0, 900, 3), OF, True)
    for name in wanted:
        found = np.concatenate([run.columns[name] for run in runs])
        np.testing.assert_array_equal(found, expected[name])
