# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What is shown of a trainer: its client, its optimizers, its loop over a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_cpudist.monitor.families import Family, Row, ages, made_of

OPTIMIZER = (
    Row("cpudist_steps", "counter", "Steps of this trainer.", "steps"),
    Row(
        "cpudist_samples",
        "counter",
        "Samples of these steps, as told to step(samples=).",
        "samples",
    ),
    Row("cpudist_step_seconds", "counter", "Seconds inside step().", "step_s"),
    Row(
        "cpudist_phase_seconds",
        "counter",
        "Seconds since the first forward, by what they went to; wait is of no other.",
        {
            "data": "phase_s.data",
            "forward": "phase_s.forward",
            "backward": "phase_s.backward",
            "push": "phase_s.push",
            "wait": "phase_s.wait",
        },
        "phase",
    ),
    Row(
        "cpudist_updates",
        "gauge",
        "Updates behind the dense values as of the last step.",
        "updates",
    ),
    Row(
        "cpudist_forwards",
        "counter",
        "Forwards whose rows were asked for at once.",
        "lookups.together",
    ),
    Row(
        "cpudist_lookups_alone",
        "counter",
        "Lookups that asked by themselves.",
        "lookups.alone",
    ),
    Row(
        "cpudist_rows_in_vain",
        "counter",
        "Rows that were asked for and not looked up.",
        "lookups.in_vain",
    ),
    Row(
        "cpudist_collective_wait_seconds",
        "counter",
        "Seconds in collectives: waiting for other trainers, and their transfers.",
        "collective.wait_s",
    ),
    Row(
        "cpudist_collective_sent_bytes",
        "counter",
        "Bytes that collectives have sent, as a ring would.",
        "collective.sent_bytes",
    ),
    Row(
        "cpudist_collective_averages",
        "counter",
        "Averages over trainers.",
        "collective.averages",
    ),
    Row(
        "cpudist_exchanges_late",
        "counter",
        "Exchanges of deltas that came late (Geo).",
        "exchange.late",
    ),
    Row(
        "cpudist_exchanges_late_steps",
        "counter",
        "Steps by which they were late.",
        "exchange.late_steps",
    ),
    Row(
        "cpudist_snapshots",
        "counter",
        "Snapshots: committed as far as this trainer knows, failed, not taken.",
        {
            "saved": "snapshot.saved",
            "failed": "snapshot.failed",
            "skipped": "snapshot.skipped",
        },
        "outcome",
    ),
    Row(
        "cpudist_snapshot_last_seconds",
        "gauge",
        "From the newest snapshot's moment to its end, on who commits.",
        "snapshot.last_s",
    ),
    Row(
        "cpudist_snapshot_pause_seconds_max",
        "gauge",
        "The longest that a snapshot has kept a step.",
        "snapshot.pause_s_max",
    ),
    Row(
        "cpudist_recoveries",
        "counter",
        "How often lost servers have come back.",
        "recovered.count",
    ),
    Row(
        "cpudist_rejoined",
        "counter",
        "How often this trainer was counted as lost, and went on.",
        "recovered.rejoined",
    ),
    Row(
        "cpudist_lost_updates",
        "counter",
        "Updates of this trainer that went with servers or with its own loss.",
        "recovered.lost_updates",
    ),
    Row(
        "cpudist_lost_seconds",
        "counter",
        "Seconds of training that went with servers.",
        "recovered.lost_s",
    ),
)

CLIENT = (
    Row(
        "cpudist_bytes",
        "counter",
        "Bytes between this trainer and all servers, headers included.",
        {"sent": "bytes_sent", "received": "bytes_received"},
        "direction",
    ),
    Row(
        "cpudist_wait_seconds",
        "counter",
        "Seconds blocked: for rounds, which other trainers must reach, and for "
        "answers of servers.",
        {"round": "round_wait_s", "server": "answer_wait_s"},
        "of",
    ),
    Row(
        "cpudist_rows",
        "counter",
        "Rows of tables between this trainer and all servers.",
        {
            "pulled": "rows_pulled",
            "pushed": "rows_pushed",
            "prefetched": "rows_prefetched",
        },
        "how",
    ),
    Row("cpudist_server_lost", "gauge", "1: this trainer has lost a server.", "failed"),
    Row("cpudist_requests", "counter", "Requests to servers.", "requests"),
    Row("cpudist_requests_resent", "counter", "Requests that were repeated.", "resent"),
    Row(
        "cpudist_reconnects",
        "counter",
        "Links to servers that broke and were made anew.",
        "reconnects",
    ),
    Row(
        "cpudist_prefetch_hits",
        "counter",
        "Rows of lookups that a prefetch had brought.",
        "prefetch_hits",
    ),
    Row(
        "cpudist_prefetch_refreshed",
        "counter",
        "Prefetched rows that came again with a round.",
        "prefetch_refreshed",
    ),
    Row(
        "cpudist_early_bytes",
        "counter",
        "Bytes of gradients that went before their push.",
        "early_bytes",
    ),
    Row(
        "cpudist_early_changed_bytes",
        "counter",
        "Bytes of those that changed afterwards, or were taken away.",
        "early_changed_bytes",
    ),
    Row(
        "cpudist_cache_dropped_rows",
        "counter",
        "Rows of remote tables whose values went for memory.",
        "cache_dropped",
    ),
    Row(
        "cpudist_residues_dropped_rows",
        "counter",
        "Rows of remote tables whose residues went for memory.",
        "residues_dropped",
    ),
    Row(
        "cpudist_pushes_queued",
        "gauge",
        "Pushes that wait to be sent (Async, Geo).",
        "queued",
    ),
    Row(
        "cpudist_pushes_merged",
        "counter",
        "Pushes that travelled with an earlier one.",
        "staleness.merged",
    ),
    Row(
        "cpudist_pushes_overloaded",
        "counter",
        "Refusals of pushes for lack of memory, sent again.",
        "staleness.overloaded",
    ),
)

TRAFFIC = (
    Row(
        "cpudist_table_wire_bytes",
        "counter",
        "Bytes of frames between this trainer and all servers that are of a table.",
        {"sent": "bytes_sent", "received": "bytes_received"},
        "direction",
    ),
)

LOOP = (
    Row(
        "cpudist_loop_batches",
        "counter",
        "Batches of train_from_dataset and infer_from_dataset.",
        "batches",
    ),
    Row("cpudist_loop_samples", "counter", "Samples of these batches.", "samples"),
    Row("cpudist_loop_seconds", "counter", "Seconds of these loops.", "seconds"),
    Row(
        "cpudist_loop_data_seconds",
        "counter",
        "Seconds of these loops in the dataset's next().",
        "waiting",
    ),
)

# By what ``staleness`` of ``stats()`` calls them: name, meaning, least buckets.
AGES = {
    "steps": (
        "cpudist_staleness_updates",
        "Updates between the reading of values and that of their gradient.",
        13,
    ),
    "samples": (
        "cpudist_staleness_samples",
        "Samples behind these updates.",
        21,
    ),
}


def of_optimizers(found: Sequence[Mapping[str, Any]]) -> list[Family]:
    """Those of all open ones, by their place."""
    numbered = [((str(i),), one) for i, one in enumerate(found)]
    return made_of(OPTIMIZER, numbered, ("optimizer",))


def of_client(stats: Mapping[str, Any], failed: bool) -> list[Family]:
    """Those of ``Client.stats()``.

    Args:
        stats: them.
        failed: a server is lost.
    """
    # A wait is of a round or of an answer; the first is part of the sum.
    answers = max(stats["wait_s"] - stats["round_wait_s"], 0.0)
    counters = {**stats, "answer_wait_s": answers, "failed": int(failed)}
    families = made_of(CLIENT, [((), counters)])
    for what, (name, text, least) in AGES.items():
        age = ages(stats["staleness"], what, least)
        families.append(Family(name, "histogram", text, (), {(): age}))
    return families


def of_traffic(found: Sequence[Mapping[str, Any]]) -> list[Family]:
    """Those of ``Client.table_traffic()``; ``set`` numbers what optimizers train."""
    named = [((one["name"], str(one["param_set"])), one) for one in found]
    return made_of(TRAFFIC, named, ("table", "set"))


def of_loops(found: Mapping[str, float]) -> list[Family]:
    """Those of loops over datasets, if there were any."""
    return made_of(LOOP, [((), found)])
