# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What figures of a trainer mean, and which knob to turn. Pure functions.

All that is compared are shares of a time and counts, which are the same on a machine
that is several times as slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch_cpudist.advice.advice import Advice
from torch_cpudist.advice.figures import Figures

# Of its time that a trainer may wait for one thing before it is worth a word.
WAITING = 0.3
# A server's thread that is busy for longer makes requests wait behind each other.
BUSY = 0.6
# Steps shorter than this mostly take turns at Python's lock where replicas share it.
_SHORT_STEP_S = 0.007


def judge(figures: Figures) -> list[Advice]:
    """All that would help, in the order in which knobs are turned (docs/tuning.md)."""
    parts = [_threads, _replicas, _servers, _network, _data, _strategy]
    return [advice for part in parts for advice in part(figures)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _times(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _threads(figures: Figures) -> Iterator[Advice]:
    computing = figures.threads * max(figures.replicas, 1)
    if computing <= max(figures.cores, 1) or computing == 1:
        return
    each = _times(figures.threads, "torch thread")
    who = each
    if figures.replicas:
        who = f"{_times(figures.replicas, 'replica')} of {each}"
    limit = max(figures.cores // max(figures.replicas, 1), 1)
    where = "CPUDIST_REPLICAS_NUM_THREADS" if figures.replicas else "CPUDIST_THREADS"
    setting = f"Unset what sets more, or set {where}={limit}"
    if figures.replicas > figures.cores:
        setting += f", and CPU_NUM={figures.cores}"
    queued = figures.queued / figures.seconds if figures.seconds > 0 else 0.0
    yield Advice(
        "threads",
        f"{who} compute on {_times(figures.cores, 'core')}, this rank's share of its "
        f"host: they wait for each other in the middle of an operator. Threads of this "
        f"process waited {queued:.1f} s for a core in each second. {setting}.",
        {
            "threads": computing,
            "cores": figures.cores,
            "queued_per_second": queued,
        },
    )


def _replicas(figures: Figures) -> Iterator[Advice]:
    seen = {
        "cores": float(figures.cores),
        "threads": float(figures.threads),
        "replicas": float(figures.replicas),
        "cores_busy": figures.cores_busy,
        "step_s": figures.seconds / max(figures.steps, 1),
    }
    if figures.replicas:
        return
    if figures.replicas_set > 1:
        yield Advice(
            "replicas",
            f"CPU_NUM={figures.replicas_set} (or CPUDIST_REPLICAS_COUNT) is set, and "
            "no ReplicaExecutor steps this optimizer: it changes nothing. Train by "
            "cpudist.ReplicaExecutor(model, loss_fn, opt).run(batch), or unset it.",
            {**seen, "replicas_set": float(figures.replicas_set)},
        )
        return
    waiting = figures.idle_s + figures.wait_s + figures.collective_s
    if figures.cores < 2 * figures.threads or figures.share(waiting) >= WAITING:
        return
    short = seen["step_s"] < _SHORT_STEP_S
    first = f"{figures.cores} times as many ranks (torchrun --nproc-per-node)"
    second = f"a ReplicaExecutor with CPU_NUM={figures.cores}"
    ways = (first, second) if short else (second, first)
    yield Advice(
        "replicas",
        f"this rank has {figures.cores} cores, computes on "
        f"{_times(figures.threads, 'thread')} and waits for nothing else: "
        f"{figures.cores_busy:.1f} cores were busy. Use the others: {ways[0]}; or "
        f"{ways[1]}.",
        seen,
    )


def _is_busy(figures: Figures) -> bool:
    return figures.load is not None and figures.load >= BUSY


def _servers(figures: Figures) -> Iterator[Advice]:
    waiting = figures.share(figures.wait_s)
    if figures.load is None or not _is_busy(figures) or waiting < WAITING:
        return
    # Without the wait trainers would ask so much more often.
    wanted = figures.load * figures.servers / max(1 - waiting, 0.1)
    count = max(math.ceil(wanted / BUSY), figures.servers + 1)
    yield Advice(
        "servers",
        f"{_percent(waiting)} of the time went in waiting for "
        f"{_times(figures.servers, 'server')}, of which the busiest has a thread that "
        f"was busy {_percent(figures.load)} of the time: too few for "
        f"{_times(figures.trainers, 'trainer')}. Start about {count} "
        f"(CPUDIST_SERVERS={count}), on hosts or cores of their own; or ask less of "
        f"them: {_less(figures)}.",
        {
            "waiting": waiting,
            "load": figures.load,
            "servers": float(figures.servers),
            "servers_wanted": float(count),
        },
    )


def _less(figures: Figures) -> str:
    """What sends fewer bytes or messages, of what is not set yet."""
    ways = ["larger batches"]
    if figures.wire_dtype == "fp32":
        ways.append("Communicator(wire_dtype='int8')")
    if figures.strategy != "Geo":
        ways.append("Geo, which exchanges every so many steps")
    else:
        ways.append("a larger Geo(push_every=)")
    return ", ".join(ways)


def _network(figures: Figures) -> Iterator[Advice]:
    waiting = figures.share(figures.servers_s)
    if waiting < WAITING or _is_busy(figures):
        return
    if figures.load is None and figures.one_host:
        return  # ranks of one host wait for its cores, not for messages on their way
    load = "whose load cannot be seen from here"
    if figures.load is not None:
        load = f"of which the busiest was busy {_percent(figures.load)} of the time"
    steps = max(figures.steps, 1)
    requests, size = figures.requests / steps, figures.bytes / steps
    took_ms = 1e3 * figures.servers_s / max(figures.requests, 1)
    yield Advice(
        "network",
        f"{_percent(waiting)} of the time went in waiting for messages to and from "
        f"{_times(figures.servers, 'server')}, {load}: the network is slow. A step "
        f"makes {requests:.1f} requests of {took_ms:.1f} ms each and moves "
        f"{size / 1e3:,.1f} kB. {_sooner(figures)}",
        {
            "waiting": waiting,
            "requests_per_step": requests,
            "request_ms": took_ms,
            "bytes_per_step": size,
        },
    )


def _sooner(figures: Figures) -> str:
    """What waits less for a link, of what is not set yet; the first is the cheapest."""
    ways = []
    if figures.alone > figures.together:
        ways.append("leave learn_lookups on, so that a forward's rows come at once")
    if figures.rows_pulled and not figures.rows_prefetched:
        ways.append("ask for rows ahead (cpudist.data.prefetch)")
    if figures.bounded:
        ways.append("raise max_staleness, whose bound is waited for alike")
    if figures.strategy in ("Sync", "HalfAsync"):
        ways.append("push in the background (Async)")
    ways.append(_less(figures))
    return f"In this order: {'; '.join(ways)}."


def _data(figures: Figures) -> Iterator[Advice]:
    waiting = figures.share(figures.idle_s)
    if waiting < WAITING:
        return
    if figures.data_s is not None:
        seen = f"{_percent(waiting)} of the time went in waiting for the next batch"
    else:
        seen = (
            f"{_percent(waiting)} of the time this thread slept, and neither for "
            "servers nor for other trainers: for data, most likely"
        )
    yield Advice(
        "data",
        f"{seen}. Read by more threads or processes: cpudist.data.QueueDataset("
        "threads=) for files, DataLoader(num_workers=) for anything else; data that "
        "fits is read once by InMemoryDataset.",
        {"waiting": waiting, "waiting_s": figures.idle_s},
    )


def _strategy(figures: Figures) -> Iterator[Advice]:
    others = figures.share(figures.others_s)
    together = figures.share(figures.collective_s)
    if others >= WAITING and not _is_busy(figures):
        yield Advice(
            "strategy",
            f"{_percent(others)} of the time went in rounds of {figures.strategy}: "
            "until other trainers had ended their step, and messages were there. If "
            "one trainer waits much less, the others wait for it: give all cores and "
            "batches alike, or do not wait (HalfAsync between hosts, Async, Geo). If "
            f"all wait alike it is the network: {_less(figures)}.",
            {"waiting": others},
        )
    if together >= WAITING:
        yield Advice(
            "strategy",
            f"{_percent(together)} of the time went in collectives: waiting for other "
            "trainers, and for transfers. Give trainers cores and batches alike, make "
            "batches larger, or average every few steps: LocalSGD(every=).",
            {"waiting": together},
        )
