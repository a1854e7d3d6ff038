# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Settings of replicas: threads of one process that train one model together."""

from __future__ import annotations

from dataclasses import field

from torch_cpudist.settings.fields import MAX_THREADS, check, settings


@settings
class Replicas:
    """How a ``ReplicaExecutor`` over this strategy's optimizer runs.

    Attributes:
        count: replicas of a ``ReplicaExecutor``, which is made by the script; without
            one nothing is divided. ``None``: this process's share of the physical
            cores. ``CPU_NUM`` sets it too. ``CPUDIST_REPLICAS_COUNT``.
        reduce: ``"reduce"``: replicas share parameters, each of which one of them sums
            and updates. ``"allreduce"``: every replica has a copy of the dense
            parameters, and of all others that no server holds.
            ``CPUDIST_REPLICAS_REDUCE``.
        num_threads: torch threads of each replica. ``None``: ``CPUDIST_THREADS``, else
            the replica's share of the cores. ``CPUDIST_REPLICAS_NUM_THREADS``.
    """

    count: int | None = field(
        default=None, metadata={"least": 1, "most": MAX_THREADS, "unit": "replicas"}
    )
    reduce: str = field(default="reduce", metadata={"choices": ("reduce", "allreduce")})
    num_threads: int | None = field(
        default=None, metadata={"least": 1, "most": MAX_THREADS, "unit": "threads"}
    )

    def __post_init__(self) -> None:
        """Checks the fields."""
        check(self)
