# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where the rows of remote tables are at the end of a run, and what memory that takes.

One line of every rank. Servers let go of rows when the last trainer has left, so a rank
that only serves looks at what it has while it serves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import nn

import torch_cpudist as cpudist

# Seconds between two looks at a server; the last evaluation of a trainer takes longer.
LOOK_EVERY_S = 0.05


class Server(Protocol):
    """What is asked of a server."""

    def table_stats(self) -> list[dict[str, int]]:
        """Return rows and bytes of its share of every table."""


def resident_mb() -> float:
    """Return the memory that this process has now, in megabytes."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def rows_of(server: Server) -> tuple[int, int]:
    """Return how many rows a server holds, and their bytes with the index."""
    found = server.table_stats()
    return sum(one["rows"] for one in found), sum(one["bytes"] for one in found)


def served_line(rows: int, bytes_: int) -> str:
    """Say what a server holds."""
    return f"{rows:,} rows that have had a gradient, {bytes_ / 1e6:.1f} MB"


def trainer_line(rank: int, model: nn.Module, server: Server | None) -> str:
    """Say what a trainer has, and the server in its process if there is one."""
    found = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tables = [m.weight for m in found if not isinstance(m, cpudist.Embedding)]
    declared = sum(len(weight) for weight in tables)
    # Values, and for each row what a trainer remembers of it.
    static = sum(len(weight) * (4 * weight.shape[1] + 8) for weight in tables)
    line = (
        f"trainer {rank}: {resident_mb():,.0f} MB of memory, with none of the "
        f"{declared:,} rows (static tables: {static / 1e9:,.1f} GB)"
    )
    if len(tables) < len(found):
        line += ", or of those of a table of any key"
    if server is not None:
        line += f"; its server has {served_line(*rows_of(server))}"
    return line


@contextmanager
def server_line(shard: int, server: Server) -> Iterator[None]:
    """Print at the end what a server had while it served."""
    ended = threading.Event()
    last = 0, 0, 0.0

    def look() -> None:
        nonlocal last
        while not ended.wait(LOOK_EVERY_S):
            rows, bytes_ = rows_of(server)
            if rows:
                last = rows, bytes_, resident_mb()

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
    rows, bytes_, resident = last
    held = served_line(rows, bytes_)
    print(f"server {shard}: {resident:,.0f} MB of memory, {held}", flush=True)
