# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ends of processes, and when they were."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from patience import PATIENCE_S

from torch_cpudist.testing import ProcessRanks

LOOK_S = 0.002


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def lose(pid: int, number: signal.Signals) -> float:
    """Kills or stops a process; the monotonic time since which it surely does nothing.

    On a busy machine that is later than the signal. What is promised "within a second"
    counts from then on.
    """
    os.kill(pid, number)
    until = time.monotonic() + PATIENCE_S
    while _state(pid) not in ("T" if number == signal.SIGSTOP else "ZX"):
        assert time.monotonic() < until, f"{number!r} has not reached process {pid}"
        time.sleep(LOOK_S)
    return time.monotonic()


def lose_rank(ranks: ProcessRanks, rank: int, number: signal.Signals) -> float:
    """``lose`` the process of a rank, which is there until the block of ranks ends."""
    return lose(ranks.pid(rank), number)
