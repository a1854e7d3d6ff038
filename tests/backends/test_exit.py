# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A process that ends while daemon threads are in calls of a backend."""

from __future__ import annotations

import subprocess
import sys

import pytest
from patience import PATIENCE_S
from programs import clean_environment

# Daemon threads: one that meets nobody, one that waits for a peer that does not come,
# both until the interpreter ends, and two that sum all the time. What the interpreter
# lets go of last takes longer than the first two wait.
ENDING = """
import ctypes, sys, threading
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_cpudist.backends.loading import load_c10d

module = load_c10d("shm")
soon, long = timedelta(seconds=2), timedelta(seconds=60)

def pair():
    store, made = dist.HashStore(), [None, None]
    def make(rank):
        host = module.meet(store, rank, 2, long, "")
        made[rank] = module.create_shm(host, rank, long, [])
    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made

alone, busy = pair(), pair()
begun = threading.Barrier(5)

def meet():
    begun.wait()
    module.meet(dist.HashStore(), 0, 2, soon, "")

def wait():
    options = dist.AllreduceOptions()
    options.timeout = soon
    begun.wait()
    alone[0].allreduce([torch.ones(4)], options).wait()

def sums(rank):
    begun.wait()
    while True:
        busy[rank].allreduce([torch.ones(4)]).wait()

for body in (meet, wait, lambda: sums(0), lambda: sums(1)):
    threading.Thread(target=body, daemon=True).start()

class Last:
    def __del__(self, usleep=ctypes.CDLL(None).usleep):
        usleep(3_000_000)

sys.last = Last()
begun.wait()
print("waits", flush=True)
"""


@pytest.mark.processes
def test_daemon_threads_in_collectives_do_not_abort():
    found = subprocess.run(
        [sys.executable, "-c", ENDING],
        capture_output=True,
        env=clean_environment(),
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "waits\n"
    assert "terminate" not in found.stderr
