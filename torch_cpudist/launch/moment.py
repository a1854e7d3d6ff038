# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Moment``: what a trainer and its process have counted by now."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch_cpudist.machine import busy
from torch_cpudist.machine.busy import Busy


@dataclass(frozen=True)
class Moment:
    """Counters at one time; what came between two of them is their difference.

    Attributes:
        at_s: the time, of ``time.perf_counter()``.
        stats: what the optimizer's ``stats()`` said.
        loops: sums over loops over datasets; empty if there was none.
        thread: id of the thread that asked, the one that trains.
        own: of that thread; ``None`` where the kernel does not count.
        threads: of all threads of the process, by id.
    """

    at_s: float
    stats: Mapping[str, Any]
    loops: Mapping[str, float]
    thread: int
    own: Busy | None
    threads: Mapping[int, Busy]


def moment_of(stats: Mapping[str, Any], loops: Mapping[str, float]) -> Moment:
    """The present moment of the calling thread.

    Args:
        stats: as the optimizer has counted.
        loops: as the run has.
    """
    thread = threading.get_native_id()
    threads = busy.of_threads()
    own = threads.get(thread)
    if own is not None:
        # Of a thread that runs the file is a tick of the kernel's clock late.
        own = replace(own, ran_s=time.thread_time())
    return Moment(time.perf_counter(), stats, loops, thread, own, threads)
