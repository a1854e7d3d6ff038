# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is shown of a server: its load, its memory, its share of every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_cpudist.monitor.families import Family, Row, made_of

SERVER = (
    Row("cpudist_server_rounds", "counter", "Rounds that were applied.", "rounds"),
    Row("cpudist_server_pushes", "counter", "Pushes that came.", "pushes"),
    Row(
        "cpudist_server_nonfinite_pushes",
        "counter",
        "Pushes with gradients that are infinite or NaN.",
        "nonfinite",
    ),
    Row(
        "cpudist_server_duplicates",
        "counter",
        "Repeated requests, answered from the record of the reply.",
        "duplicates",
    ),
    Row(
        "cpudist_server_refused",
        "counter",
        "Handshakes that were refused, and malformed frames.",
        "refused",
    ),
    Row(
        "cpudist_server_strangers",
        "counter",
        "Connections that were refused for want of the key, or closed so that others "
        "had a place before they said who they are.",
        {"unauthenticated": "unauthenticated", "turned_away": "turned_away"},
        "end",
    ),
    Row(
        "cpudist_server_half_open",
        "gauge",
        "Connections of which nobody has said yet who is there.",
        "half_open",
    ),
    Row(
        "cpudist_server_bytes",
        "counter",
        "Bytes between this server and all trainers, headers included.",
        {"sent": "bytes_sent", "received": "bytes_received"},
        "direction",
    ),
    Row(
        "cpudist_server_snapshot_waits",
        "counter",
        "Pushes that waited for a snapshot to get on.",
        "snapshot_waits",
    ),
    Row("cpudist_server_connections", "gauge", "Open links.", "connections"),
    Row(
        "cpudist_server_trainers",
        "gauge",
        "Trainers: that ever said hello, that are lost now, and that are there.",
        {"seen": "trainers", "lost": "lost", "present": "present"},
        "state",
    ),
    Row(
        "cpudist_server_part_bytes",
        "gauge",
        "Memory by what is in it; pushes are those that wait for their round.",
        {
            "tables": "table_bytes",
            "dense": "dense_bytes",
            "pushes": "pending_bytes",
            "marks": "marks_bytes",
            "backups": "backup_bytes",
            "snapshot": "snapshot_bytes",
        },
        "part",
    ),
    Row(
        "cpudist_server_memory_bytes",
        "gauge",
        "Memory that Server(memory_cap_bytes=) counts.",
        "memory_bytes",
    ),
    Row(
        "cpudist_server_memory_cap_bytes",
        "gauge",
        "That cap; 0: none.",
        "memory_cap_bytes",
    ),
)

MEETING = (
    Row(
        "cpudist_meeting_refused",
        "counter",
        "Visitors of CPUDIST_RENDEZVOUS that have not proven the key.",
        "refused",
    ),
)

TABLE = (
    Row("cpudist_table_rows", "gauge", "Rows that take memory here.", "rows"),
    Row("cpudist_table_bytes", "gauge", "Bytes of these rows, and index.", "bytes"),
    Row("cpudist_table_created_rows", "counter", "Rows that pushes made.", "created"),
    Row(
        "cpudist_table_filtered_rows",
        "counter",
        "Rows of pushes that were dropped: their keys were not admitted.",
        "filtered",
    ),
    Row("cpudist_table_evicted_rows", "counter", "Rows that have gone.", "evicted"),
    Row(
        "cpudist_table_unknown_reads",
        "counter",
        "Reads of keys without a row.",
        "unknown_reads",
    ),
    Row("cpudist_table_pushed_rows", "counter", "Rows of pushes.", "pushed_rows"),
    Row(
        "cpudist_table_fullest_part_rows",
        "counter",
        "Rows of pushes in that sixteenth of the keys here that has most of them.",
        "fullest_part_rows",
    ),
)


def of_server(stats: Mapping[str, Any], memory_cap_bytes: int) -> list[Family]:
    """Those of ``Server.stats()``."""
    counters = {**stats, "memory_cap_bytes": memory_cap_bytes}
    return made_of(SERVER, [((), counters)])


def of_meeting(refused: int) -> list[Family]:
    """Those of ``MeetingPoint``, which server 0 has for trainers of other jobs."""
    return made_of(MEETING, [((), {"refused": refused})])


def of_tables(found: Sequence[Mapping[str, Any]]) -> list[Family]:
    """Those of ``Server.table_stats()``; ``set`` numbers what optimizers train."""
    named = []
    for one in found:
        parts = {
            "pushed_rows": sum(one["pushed"]),
            "fullest_part_rows": max(one["pushed"]),
        }
        named.append(((one["name"], str(one["param_set"])), {**one, **parts}))
    return made_of(TABLE, named, ("table", "set"))
