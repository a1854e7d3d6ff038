# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tells how far the sending of initial values is: large tables take minutes."""

from __future__ import annotations

import time

from torch_cpudist.log import logger
from torch_cpudist.model.placement import Placement

# Between two lines of one table; what is through before that is not told of.
INTERVAL_S = 5.0
# Less is sent before anybody would look.
TOLD_BYTES = 16 << 20


class Sending:
    """Rows of one table on their way to the servers. Not thread-safe."""

    def __init__(self, name: str, rows: int) -> None:
        """Begins to count.

        Args:
            name: of the table.
            rows: that will be sent.
        """
        self._name = name
        self._rows = rows
        self._began = self._told = time.monotonic()
        self._silent = True

    def sent(self, rows: int) -> None:
        """Tells, with ``CPUDIST_LOG=info``, of ``rows`` that are through in all."""
        now = time.monotonic()
        over = rows >= self._rows and not self._silent
        if now - self._told < INTERVAL_S and not over:
            return
        self._told = now
        self._silent = False
        logger.info(
            "table %r: %d of %d rows sent to the servers, %.0f s",
            self._name,
            rows,
            self._rows,
            now - self._began,
        )


def values_bytes(placement: Placement) -> int:
    """Bytes of all weights of a placement, with the keys of rows."""
    specs = [spec for spec in placement.layout.tables if not spec.remote]
    tables = sum(spec.rows * (8 + 4 * spec.dim) for spec in specs)
    return tables + sum(entry.parameter.nbytes for entry in placement.dense)


def tell_waiting(trainer_rank: int, placement: Placement) -> None:
    """Says, with ``CPUDIST_LOG=info``, what this trainer waits for."""
    size_bytes = values_bytes(placement)
    if size_bytes >= TOLD_BYTES:
        names = [spec.name for spec in placement.layout.tables if not spec.remote]
        logger.info(
            "trainer %d waits until trainer 0 has sent its %d bytes of values to the "
            "servers (%s)",
            trainer_rank,
            size_bytes,
            f"tables {', '.join(map(repr, names[:3]))}" if names else "no tables",
        )
