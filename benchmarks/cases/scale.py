# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``scale``: many trainers whose compute is emulated, and dedicated servers.

Every trainer and server is alone on a host of its own (a network namespace), its cable
passes ``--rate`` bits per second each way. What trainers and servers say to each other
is that of the case ``ctr``; forward and backward are a sleep as long as they took one
trainer alone. One launch has one trainer first, then a quarter, then all of them.

With ``--dilation D`` sleeps last D times as long and cables pass a D-th, so that the
cores of this machine are to all these hosts as D times as many would be. Rates are
given in the time of the hosts, D times what a clock on the wall says.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import ctr_data
from hosts import QUEUE_MS, HostsError, bits_per_s, hosts
from job import Job
from launch import LaunchError, Report, launch, run_folder
from peers import PeerSpec, strategy_row
from report import MISSING, Row

from cases import ctr, network

COLUMNS = {
    "rate": "rate",
    "name": "name",
    "trainers": "trainers",
    "servers": "servers",
    "compute": "compute of a step",
    "samples_per_s": "samples/s",
    "efficiency": "efficiency",
    "trainer_cpu_us_per_sample": "trainers CPU us/sample",
    "server_cpu_us_per_sample": "servers CPU us/sample",
    "bytes_per_sample": "bytes/sample",
    "waiting_share": "waiting",
    "server_cable": "server cable",
    "trainer_cable": "trainer cable",
    "server_cpu": "server CPU",
    "machine": "this machine",
    "machine_own": "of it here",
    "fullest": "fullest",
}
STRATEGIES = ("sync", "half_async", "async", "geo")
# Shares of what there is, in a row of figures; 1 is saturated.
RESOURCES = {
    "server_cable": "a server's cable",
    "trainer_cable": "a trainer's cable",
    "server_cpu": "a server's cores",
    "machine": "this machine's cores",
}


def dilated(rate: str, dilation: float) -> str:
    """Returns the rate of a cable in a time that goes ``dilation`` times slower."""
    return f"{max(1, round(bits_per_s(rate) / dilation / 1000))}kbit"


def figures(
    reports: Sequence[Report], count: int, job: Job, rate: str, cores: int
) -> dict[str, float]:
    """Joins what the trainers of one phase of a launch say into figures.

    Args:
        reports: of all trainers of the launch.
        count: how many of them trained.
        job: of the launch.
        rate: of every cable, undilated.
        cores: of a host.
    """
    done = [report["phases"][str(count)] for report in reports[:count]]
    servers, samples = done[0]["servers"], sum(one["samples"] for one in done)
    seconds = done[0]["seconds"]  # trainer 0's, in which the servers were watched
    cpu_s = sum(one["cpu_s"] for one in done)
    watched = samples * seconds / max(one["seconds"] for one in done)
    # Bytes per second of the wall that fill a cable, and cores of a slower clock.
    full = bits_per_s(rate) / 8 / job.dilation
    host = cores / job.dilation
    return {
        "samples_per_s": job.dilation
        * sum(one["samples"] / one["seconds"] for one in done),
        "trainer_cpu_us_per_sample": 1e6 * cpu_s / samples,
        "server_cpu_us_per_sample": 1e6 * sum(s["cpu_s"] for s in servers) / watched,
        "bytes_per_sample": sum(one["bytes"] for one in done) / samples,
        "waiting_share": sum(one["wait_s"] for one in done)
        / sum(one["seconds"] for one in done),
        "server_cable": max(max(s["received"], s["sent"]) for s in servers)
        / (seconds * full),
        "trainer_cable": max(
            max(one["received"], one["sent"]) / one["seconds"] for one in done
        )
        / full,
        "server_cpu": max(s["cpu_s"] for s in servers) / (seconds * host),
        "machine": done[0]["machine_share"],
        "machine_own": (cpu_s + sum(s["cpu_s"] for s in servers)) / (seconds * cores),
    }


def fullest(row: Mapping[str, Any]) -> str:
    """Returns which resource is used the most, and how much of it."""
    name = max(RESOURCES, key=lambda one: float(row[one]))
    return f"{RESOURCES[name]}, {row[name]:.0%}"


def make_rows(
    name: str, job: Job, rate: str, launches: Sequence[Sequence[Report]]
) -> list[Row]:
    """Returns a row for each number of trainers: medians over the launches."""
    cores = len(os.sched_getaffinity(0))
    slept_ms = 1e3 * median(reports[0]["step_s"] for reports in launches)
    rows: list[Row] = []
    for count in map(int, launches[0][0]["phases"]):
        found = [figures(reports, count, job, rate, cores) for reports in launches]
        row: Row = {
            "case": "scale",
            "rate": rate,
            "name": name,
            "trainers": count,
            "servers": job.servers,
            "launches": len(launches),
            "batch": job.batch,
            "compute": f"emulated: sleeps {slept_ms:.1f} ms",
            "step_ms": slept_ms,
            "step_ms_measured": not job.step_ms,
            "dilation": job.dilation,
            **{key: median(one[key] for one in found) for key in found[0]},
        }
        row["fullest"] = fullest(row)
        rows.append(row)
    alone = rows[0]["samples_per_s"]
    for row in rows:
        row["efficiency"] = row["samples_per_s"] / (row["trainers"] * alone)
    return rows


def select(args: argparse.Namespace) -> dict[str, PeerSpec]:
    """Returns the rows asked for.

    Raises:
        ValueError: peers, or no servers, or no strategies, or no such numbers.
    """
    if args.peers or not args.strategies:
        raise ValueError("scale has --strategies and no --peers")
    if args.servers < 1:
        raise ValueError("scale: expected --servers of at least 1, found 0")
    if wrong := [s for s in args.strategies if s.partition(":")[0] not in STRATEGIES]:
        known = ", ".join(STRATEGIES)
        raise ValueError(
            f"scale: trainers that rest have left, which only {known} allow; "
            f"found {wrong}"
        )
    if args.step_ms < 0 or args.dilation < 1:
        raise ValueError("scale: expected --step-ms >= 0 and --dilation >= 1")
    if args.bf16 or args.steps:
        raise ValueError("scale has neither --bf16 nor --steps: it sleeps --seconds")
    return {
        f"cpudist-{name}": replace(
            strategy_row(name), module="scale_rank", launcher="ranks"
        )
        for name in args.strategies
    }


def make_job(
    name: str, spec: PeerSpec, args: argparse.Namespace, run_dir: str, data: Any
) -> Job:
    """Returns what the ranks of one launch are told."""
    return replace(
        ctr.make_job(name, spec, args, run_dir, data),
        step_ms=args.step_ms,
        dilation=args.dilation,
        # One window for each number of trainers; the rest is as slow as the cables.
        deadline_s=args.deadline_s * args.dilation
        + args.seconds * args.trainers.bit_length(),
    )


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Returns a row per rate, strategy and number of trainers.

    Raises:
        ValueError: wrong options, or hosts cannot be made here.
    """
    rows = select(args)
    data = ctr_data.prepare(ctr_data.CtrSpec(), ctr.CACHE)
    result: list[Row] = []
    for rate in args.rate or network.DEFAULT_RATES:
        try:
            slow = dilated(rate, args.dilation), round(QUEUE_MS * args.dilation)
            with hosts(args.trainers + args.servers, *slow) as made:
                for name, spec in rows.items():
                    result += _measure(name, spec, args, data, rate, made)
        except HostsError as error:
            raise ValueError(f"cannot make hosts here: {error}") from error
    return result


def _measure(
    name: str,
    spec: PeerSpec,
    args: argparse.Namespace,
    data: Any,
    rate: str,
    made: Any,
) -> list[Row]:
    done: list[list[Report]] = []
    for number in range(args.launches):
        print(f"launch {number + 1}: {name}", file=sys.stderr, flush=True)
        with run_folder() as run_dir:
            job = make_job(name, spec, args, run_dir, data)
            try:
                done.append(launch(spec, job, made))
            except LaunchError as error:
                print(f"failed: {error}", file=sys.stderr, flush=True)
                reason = str(error).partition("\n")[0]
                row = {"case": "scale", "rate": rate, "name": name}
                return [{**row, "failed": True, MISSING: reason}]
    return make_rows(name, job, rate, done)
