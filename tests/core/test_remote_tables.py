# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables that no trainer holds, through the binding: what is read, what is made."""

from __future__ import annotations

import numpy as np
import pytest
from core_cluster import Cluster, Trainer, address

from torch_cpudist import _core

ROWS = 1 << 54
DIM = 4
LR = np.float32(0.5)
STEPS = 5


class RemoteTrainer(Trainer):
    """A client of a remote table; trainers draw different seeds."""

    def open(self, layout):
        self.spec = _core.TableSpec(
            "words",
            ROWS,
            DIM,
            remote=True,
            seed=1000 + self.rank,
            initial=[("uniform", -1, 1)],
        )
        self.set = self.client.open(
            _core.ParamSetLayout(configs=layout.configs, tables=[self.spec], blocks=[])
        )
        self.set.ready()

    def lookup(self, ids, keep=True):
        ids = np.ascontiguousarray(ids, np.int64)
        out = np.full((len(ids), DIM), np.nan, np.float32)
        self.set.lookup(0, address(ids), len(ids), False, address(out), keep)
        return out

    def push(self, keys, rows):
        keys, rows = np.ascontiguousarray(keys), np.ascontiguousarray(rows)
        return self.set.push(
            configs=[self.config],
            parameters=[],
            tables=[(0, address(keys), len(keys), address(rows))],
            weights=[],
        )


def begun(cluster, keys):
    """What rows begin with: trainer 0's seed counts."""
    keys = np.ascontiguousarray(keys, np.int64)
    out = np.empty((len(keys), DIM), np.float32)
    spec = cluster.trainers[0].spec
    _core.initial_rows(spec, address(keys), len(keys), address(out))
    return out


def stats(cluster, name):
    return sum(server.table_stats()[0][name] for server in cluster.servers)


@pytest.fixture(params=[1, 3])
def cluster(request):
    with Cluster(2, request.param) as made:
        made.trainers = [
            RemoteTrainer(one.client, one.rank, one.config) for one in made.trainers
        ]
        made.start()
        yield made
        made.run(lambda trainer: trainer.client.goodbye())


def test_reading_makes_no_row(cluster):
    keys = np.random.default_rng(0).integers(0, ROWS, 100_000)
    before = stats(cluster, "bytes")
    for trainer in cluster.trainers:
        np.testing.assert_array_equal(
            trainer.lookup(keys, keep=False), begun(cluster, keys)
        )
    assert stats(cluster, "rows") == stats(cluster, "created") == 0
    assert stats(cluster, "bytes") == before < 1 << 20


def test_pushes_make_the_rows_that_they_name(cluster):
    edges = np.array([0, 1, ROWS - 2, ROWS - 1])
    keys = np.concatenate((edges, np.random.default_rng(1).integers(2, ROWS - 2, 60)))
    expected = dict(zip(keys.tolist(), begun(cluster, keys), strict=True))

    def batch(rank, step):
        rng = np.random.default_rng([rank, step])
        ids = rng.choice(keys[: 40 + 4 * step], 12, replace=False)
        return ids, rng.integers(-4, 5, (12, DIM)).astype(np.float32)

    def train(trainer):
        for step in range(STEPS):
            ids, rows = batch(trainer.rank, step)
            trainer.lookup(ids)
            trainer.push(ids, rows)

    cluster.run(train)
    trained = set()
    for step in range(STEPS):
        total = {}
        for rank in range(2):
            for key, row in zip(*batch(rank, step), strict=True):
                total[int(key)] = total.get(int(key), np.float32(0)) + row
        for key, row in total.items():
            expected[key] = expected[key] - LR * (row / np.float32(2))
        trained |= set(total)
    found = cluster.trainers[1].lookup(keys)
    for key, row in zip(keys.tolist(), found, strict=True):
        np.testing.assert_array_equal(row, expected[key])
    assert stats(cluster, "rows") == stats(cluster, "created") == len(trained)
