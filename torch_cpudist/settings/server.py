# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How servers run."""

from __future__ import annotations

from dataclasses import field

from torch_cpudist.settings.fields import MAX_BYTES, MAX_THREADS, check, settings


@settings
class Server:
    """How a server runs. Servers start in ``init()``: pass it there.

    Attributes:
        threads: threads that handle requests, and as many that update one round
            together; at most 1024; 0 takes this rank's share of the cores.
            ``CPUDIST_SERVER_THREADS``.
        memory_cap_bytes: bytes of values (rows, their index, what is made ahead of
            them, dense blocks, averages) and of pushes that come in or wait on one
            server. A model whose values and dense gradients, under Sync those of all
            trainers, exceed it is refused with ``OverloadedError``, and so is a push
            that does: Async's queue sends it again where other pushes are in the way,
            and ends where it can never fit. Geo's exchanges go in parts that fit. What
            a snapshot takes while it is written counts, too: it is given up where
            there is no room for both. 0 is no cap. docs/tables.md, "A cap on a
            server's memory".
            ``CPUDIST_SERVER_MEMORY_CAP_BYTES``.
        snapshot_memory_bytes: bytes that a server keeps of rows which change before
            a snapshot has written them; with three quarters of it in use each push
            waits up to 0.1 s for the disk, and a snapshot that needs more all the same
            is given up while training goes on.
            ``CPUDIST_SERVER_SNAPSHOT_MEMORY_BYTES``.
        nonfinite: what a server does with a push that has gradients which are infinite
            or NaN. ``"raise"``: ``NonFiniteGradientError`` out of its trainer's
            ``step()``, under ``Sync`` and in a group of ``HalfAsync`` out of that of
            all trainers of the round, and nothing of it is applied; ``"skip"``: that
            server takes the push as one of a trainer without samples, and counts it
            (under ``Geo``, where weights travel, it raises all the same); ``"apply"``:
            nobody looks. Costs one pass over what comes. ``CPUDIST_SERVER_NONFINITE``.
    """

    threads: int = field(
        default=0, metadata={"least": 0, "most": MAX_THREADS, "unit": "threads"}
    )
    memory_cap_bytes: int = field(
        default=0, metadata={"least": 0, "most": MAX_BYTES, "unit": "bytes"}
    )
    snapshot_memory_bytes: int = field(
        default=512 << 20,
        metadata={"least": 1 << 20, "most": MAX_BYTES, "unit": "bytes"},
    )
    nonfinite: str = field(
        default="raise", metadata={"choices": ("raise", "skip", "apply")}
    )

    def __post_init__(self) -> None:
        """Checks the fields."""
        check(self)
