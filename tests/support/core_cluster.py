# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Servers and trainers of one process, driven through _core."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from patience import PATIENCE_S

from torch_cpudist import _core

ROWS, DIM, HIDDEN = 40, 4, 11


def address(array):
    return array.ctypes.data


def make_layout(config, server_count, blocks=2):
    """One table and one dense parameter cut into blocks on different servers."""
    size = -(-HIDDEN // blocks)
    return _core.ParamSetLayout(
        configs=[config],
        tables=[_core.TableSpec("words", ROWS, DIM)],
        blocks=[
            _core.BlockSpec(
                f"dense.block{i}",
                min(size, HIDDEN - i * size),
                shard=i % server_count,
                offset=i * size,
            )
            for i in range(blocks)
        ],
    )


class Trainer:
    """A client with its copies of one table and one dense parameter."""

    def __init__(self, client, rank, config):
        self.client, self.rank, self.config = client, rank, config
        rng = np.random.default_rng(5)
        self.table = rng.standard_normal((ROWS, DIM)).astype(np.float32)
        self.dense = rng.standard_normal(HIDDEN).astype(np.float32)
        self.set = None

    def open(self, layout):
        self.set = self.client.open(layout)
        if self.rank == 0:
            self.set.store_run(0, 0, ROWS, address(self.table))
            self.set.store_parameter(0, address(self.dense))
        self.set.ready()
        # What is there now must come from the servers.
        self.table[:] = np.nan
        self.dense[:] = np.nan
        self.set.bind_table(0, address(self.table))
        self.pull_dense()

    def pull(self, ids):
        ids = np.ascontiguousarray(ids)
        self.set.pull(0, address(ids), ids.size, ids.dtype == np.int32)

    def pull_dense(self):
        self.set.pull_dense([address(self.dense)])

    def push(self, keys=None, rows=None, dense=None, **options):
        tables = []
        if keys is not None:
            keys = np.ascontiguousarray(keys, dtype=np.int64)
            rows = np.ascontiguousarray(rows, dtype=np.float32)
            tables = [(0, address(keys), len(keys), address(rows))]
        parameters = [] if dense is None else [(0, address(dense))]
        return self.set.push(
            configs=[self.config],
            parameters=parameters,
            tables=tables,
            weights=[address(self.dense)],
            **options,
        )

    def fetch(self):
        """Weights on the servers: (table, dense)."""
        table = np.full((ROWS, DIM), np.nan, np.float32)
        dense = np.full(HIDDEN, np.nan, np.float32)
        self.set.fetch_run(0, 0, ROWS, address(table))
        self.set.fetch_parameter(0, address(dense))
        return table, dense


class Cluster:
    """``servers`` servers and one connected client per trainer."""

    def __init__(self, trainers, servers, plan=None, config=None, **options):
        self.network = _core.InprocNetwork(plan)
        elastic = options.pop("elastic", False)
        self.config = config or _core.OptimizerConfig("sgd", lr=0.5)
        shared = {
            "liveness_ms": options.get("liveness_ms", 5000),
            "reconnect_grace_ms": options.get("reconnect_grace_ms", 5000),
        }
        self.servers = [
            _core.Server(
                run_id=7,
                shard_id=s,
                server_count=servers,
                trainer_count=trainers,
                host=f"host-{s}",
                elastic=elastic,
                **shared,
            )
            for s in range(servers)
        ]
        self.addresses = [
            [server.listen_inproc(self.network, f"server{s}")]
            for s, server in enumerate(self.servers)
        ]
        self.options = options
        self.make_trainers(trainers, servers)

    def make_trainers(self, trainers, servers):
        """Once servers listen and there are options for clients."""
        self.layout = make_layout(self.config, servers)
        self.trainers = [
            Trainer(self.make_client(rank, trainers), rank, self.config)
            for rank in range(trainers)
        ]

    def make_client(self, rank, trainers, **options):
        settings = {
            "run_id": 7,
            "trainer_rank": rank,
            "trainer_count": trainers,
            "servers": self.addresses,
            "network": self.network,
            "reconnect_grace_ms": 5000,
            "rpc_retries": 1000,  # plans cut links far more often than any network
        }
        return _core.Client(**(settings | self.options | options))

    def run(self, work):
        """Runs ``work(trainer)`` of every trainer in a thread of its own."""
        return run_all([lambda t=t: work(t) for t in self.trainers])

    def start(self):
        def begin(trainer):
            trainer.client.connect()
            trainer.open(self.layout)

        self.run(begin)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for trainer in self.trainers:
            with contextlib.suppress(Exception):
                trainer.client.abort("the test is over")
        for server in self.servers:
            server.stop()


def run_all(calls):
    """Runs calls side by side; returns their results, raises the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=PATIENCE_S) for future in futures]
