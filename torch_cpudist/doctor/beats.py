# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How late a thread wakes while this process computes on all its cores.

Heartbeats are sent by a thread that wakes now and then, beside those that compute. Who
wakes too late has been silent for too long, and counts as lost.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch

_NAP_S = 0.005
_WATCHED_S = 0.4
# Large enough that torch takes all its threads, small enough to end within a nap.
_SIDE = 256


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Has torch's threads compute until the end of the block."""
    done = threading.Event()
    matrix = torch.ones(_SIDE, _SIDE)

    def compute() -> None:
        while not done.is_set():
            torch.mm(matrix, matrix)

    thread = threading.Thread(target=compute, name="cpudist-doctor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def latest_wake_s(watched_s: float = _WATCHED_S) -> float:
    """Seconds by which the latest of many short sleeps was too long, under load.

    Args:
        watched_s: how long to look.
    """
    latest = 0.0
    with computing():
        end = time.monotonic() + watched_s
        while (began := time.monotonic()) < end:
            time.sleep(_NAP_S)
            latest = max(latest, time.monotonic() - began - _NAP_S)
    return latest
