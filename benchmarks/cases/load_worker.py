# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The processes of the case ``load``, which a case may measure from outside.

``server JSON``: one server; prints its addresses, serves until its input ends, prints
its counters. ``small PUSHES``: a server and a trainer of one process; prints how its
memory went.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from torch_cpudist import _core

RUN_ID = 1
CROSSED_OFF_S = 20.0
ROWS = 65_536
DIM = 16
SGD = _core.OptimizerConfig("sgd", lr=1.0)


def layout(rows: int = ROWS) -> _core.ParamSetLayout:
    """Returns a table of ``rows`` and a dense parameter of four, SGD, on arrival."""
    return _core.ParamSetLayout(
        configs=[SGD],
        tables=[_core.TableSpec("table", rows, DIM)],
        blocks=[_core.BlockSpec("dense", 4)],
        on_arrival=True,
    )


def open_set(
    client: _core.Client, rank: int, table: Any, dense: Any
) -> tuple[_core.ParamSet, _core.AsyncPushes]:
    """Opens the parameter set; trainer 0 stores ``table`` and ``dense``."""
    param_set = client.open(layout(len(table)))
    if rank == 0:
        param_set.store_run(0, 0, len(table), table.ctypes.data)
        param_set.store_parameter(0, dense.ctypes.data)
    param_set.ready()
    param_set.bind_table(0, table.ctypes.data)
    pushes = param_set.start_queue(size=2, max_merge=2, mean=[False], pull_every=1)
    return param_set, pushes


def resident_bytes(pid: int | str = "self") -> int:
    """Returns the resident memory of a process, as the kernel counts it."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no line VmRSS")


def serve(options: dict[str, Any]) -> None:
    """Serves until the input ends, which is also what a dead parent looks like."""
    server = _core.Server(run_id=RUN_ID, elastic=True, **options)
    print(json.dumps(server.listen_tcp(unix_socket=False)), flush=True)
    sys.stdin.read()
    # A peer sees its socket closed before the server has crossed the connection off.
    deadline = time.monotonic() + CROSSED_OFF_S
    while server.stats()["connections"] != 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    print(json.dumps(server.stats()), flush=True)
    server.stop()


def push_small(pushes: int) -> None:
    """Pushes four numbers at a time and watches this process's memory."""
    network = _core.InprocNetwork()
    server = _core.Server(run_id=RUN_ID)
    address = server.listen_inproc(network, "small")
    client = _core.Client(run_id=RUN_ID, servers=[[address]], network=network)
    client.connect()
    dense = np.zeros(4, np.float32)
    param_set, queued = open_set(client, 0, np.zeros((1, DIM), np.float32), dense)
    gradient = np.ones(4, np.float32)
    step = {
        "configs": [SGD],
        "parameters": [(0, gradient.ctypes.data)],
        "weights": [dense.ctypes.data],
        "samples": 1,
    }
    resident = []
    began = time.monotonic()
    for part in range(10):
        for _ in range(pushes * part // 10, pushes * (part + 1) // 10):
            queued.enqueue(**step)
        param_set.drain()
        resident.append(resident_bytes())
    elapsed_s = time.monotonic() - began
    param_set.pull_dense([dense.ctypes.data])
    stats = client.stats()["staleness"]
    client.goodbye()
    server.stop()
    print(
        json.dumps(
            {
                "resident_bytes": resident,
                "elapsed_s": elapsed_s,
                "dense": float(dense[0]),
                "applied": stats["pushes"],
                "buckets": len(stats["steps"]) + len(stats["samples"]),
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(json.loads(sys.argv[2]))
    else:
        push_small(int(sys.argv[2]))
