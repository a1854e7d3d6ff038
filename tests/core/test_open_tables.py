# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Open tables, admission and bounds of rows, through the binding."""

from __future__ import annotations

import numpy as np
import pytest
from core_cluster import Cluster, Trainer, address

from torch_cpudist import _core, errors

DIM = 4
KEYS = np.array([-(2**63), -7, -1, 0, 1, 5, 2**62, 2**63 - 1], np.int64)


class OpenTrainer(Trainer):
    """A client of an open table of zeros, which ``options`` say more of."""

    options: dict[str, object]

    def open(self, layout):
        spec = _core.TableSpec(
            "words", 1 << 54, DIM, remote=True, open=True, **self.options
        )
        self.set = self.client.open(
            _core.ParamSetLayout(
                configs=layout.configs,
                tables=[spec],
                blocks=[],
                push_dtype=self.wire,
                pull_dtype="fp32",
            )
        )
        self.set.ready()

    def lookup(self, ids):
        out = np.full((len(ids), DIM), np.nan, np.float32)
        self.set.lookup(0, address(ids), len(ids), False, address(out), True)
        return out

    def push(self, keys, rows):
        return self.set.push(
            configs=[self.config],
            parameters=[],
            tables=[(0, address(keys), len(keys), address(rows))],
            weights=[],
        )

    def step(self, keys, value=1.0):
        """One round: every element of these rows has this gradient."""
        self.lookup(keys)
        self.push(keys, np.full((len(keys), DIM), value, np.float32))


def stats(cluster, name):
    return sum(server.table_stats()[0][name] for server in cluster.servers)


def run(trainers, servers, work, wire="fp32", **options):
    """``work(trainer)`` of every trainer; returns the cluster's stats at the end."""
    with Cluster(trainers, servers) as cluster:
        cluster.trainers = [
            OpenTrainer(one.client, one.rank, one.config) for one in cluster.trainers
        ]
        for trainer in cluster.trainers:
            trainer.options, trainer.wire = options, wire
        cluster.start()
        cluster.run(work)
        names = ("rows", "created", "filtered", "unknown_reads")
        found = {name: stats(cluster, name) for name in names}
        cluster.run(lambda trainer: trainer.client.goodbye())
    return found


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])  # keys are coded where it rounds
def test_every_key_has_a_row(servers, wire):
    def work(trainer):
        trainer.step(KEYS, 1.0 + trainer.rank)
        trainer.step(KEYS[::2].copy())
        found = trainer.lookup(KEYS)
        once = np.float32(-0.5 * 1.5)
        np.testing.assert_array_equal(found[1::2], np.full((4, DIM), once))
        np.testing.assert_array_equal(found[::2], np.full((4, DIM), once - 0.5))

    found = run(2, servers, work, wire)
    assert found == {
        "rows": len(KEYS),
        "created": len(KEYS),
        "filtered": 0,
        "unknown_reads": 2 * len(KEYS),
    }


def test_rows_come_with_their_second_push():
    def work(trainer):
        trainer.step(KEYS)
        np.testing.assert_array_equal(trainer.lookup(KEYS), 0)
        trainer.step(KEYS[:3].copy())
        found = trainer.lookup(KEYS)
        np.testing.assert_array_equal(found[:3], -0.5)
        np.testing.assert_array_equal(found[3:], 0)

    found = run(1, 3, work, admission=("count", 2, 1.0, 1 << 16))
    assert (found["rows"], found["filtered"]) == (3, len(KEYS))


def test_a_full_table_fails_the_round_of_all():
    def work(trainer):
        trainer.step(KEYS[:4].copy())
        with pytest.raises(errors.TableFullError, match="max_rows = 4; no row"):
            trainer.step(KEYS[4 - 2 * trainer.rank :].copy())

    assert run(2, 1, work, max_rows=4)["rows"] == 4


def test_unknown_keys_read_zeros():
    def work(trainer):
        np.testing.assert_array_equal(trainer.lookup(KEYS), 0)
        trainer.step(KEYS[:1].copy())
        found = trainer.lookup(KEYS)
        np.testing.assert_array_equal(found[:1], 2.5)
        np.testing.assert_array_equal(found[1:], 0)

    run(1, 1, work, unknown_zeros=True, initial=[("fill", 3.0, 0)])


def test_what_an_open_table_cannot_do_is_refused():
    admission = ("count", 16, 1.0, 64)
    spec = _core.TableSpec("words", 9, DIM, remote=True, admission=admission)
    with Cluster(1, 1) as cluster:
        layout = _core.ParamSetLayout(
            configs=cluster.layout.configs, tables=[spec], blocks=[]
        )
        client = cluster.trainers[0].client
        client.connect()
        with pytest.raises(errors.InvalidArgumentError, match="pushed 16 times"):
            client.open(layout)
