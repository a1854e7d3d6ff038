# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks as threads, before there is any context."""

from __future__ import annotations

import threading

from patience import PATIENCE_S


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
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return outcomes
