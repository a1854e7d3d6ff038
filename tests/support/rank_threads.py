# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks as threads, before there is any context."""

from __future__ import annotations

import threading

JOIN_S = 30.0


def in_threads(count, body):
    """Runs body(rank) in threads; returns results, or the errors, by rank."""
    outcomes = [None] * count

    def run(rank):
        try:
            outcomes[rank] = body(rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [
        threading.Thread(target=run, args=(r,), daemon=True) for r in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive()
    return outcomes
