# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a client says while it waits for values that another one sends."""

from __future__ import annotations

import time

from core_cluster import ROWS, Cluster, address, run_all
from patience import PATIENCE_S


def test_who_sends_values_is_no_straggler_until_it_stops():
    said = []
    options = {"probe_ms": 10, "straggler_log_ms": 150, "round_deadline_ms": 60_000}
    options["logger"] = lambda level, text: said.append((level, text))
    warning, info = 0, 1

    def last():
        return said[-1] if said else (None, "")

    with Cluster(2, 1, **options) as cluster:
        first, second = cluster.trainers
        run_all([first.client.connect, second.client.connect])
        for trainer in cluster.trainers:
            trainer.set = trainer.client.open(cluster.layout)

        def store_until(level, sends):
            deadline = time.monotonic() + PATIENCE_S
            while last()[0] != level:
                assert time.monotonic() < deadline
                if sends:
                    first.set.store_run(0, 0, ROWS, address(first.table))
                time.sleep(0.005)

        def begin():
            store_until(info, sends=True)
            assert "MiB of values so far" in last()[1]
            store_until(warning, sends=False)
            assert "ready: waited" in last()[1]
            first.set.store_parameter(0, address(first.dense))
            first.set.ready()

        run_all([begin, second.set.ready])
