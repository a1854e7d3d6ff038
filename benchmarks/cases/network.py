# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``network``: the case ``ctr`` between hosts with a slow network.

Every trainer is alone on a host of its own (a network namespace) behind a switch, its
cable passes ``--rate`` bits per second each way. Where hosts cannot be made the case
says so and stops. Ratios are against the peer ``ddp``, if it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any

import ctr_data
from hosts import Host, HostsError, hosts
from launch import LaunchError, Report, launch, run_folder
from report import MISSING, Row, add_ratios

from cases import ctr

DEFAULT_RATES = ("100mbit",)
COLUMNS = {
    "rate": "rate",
    "name": "name",
    "trainers": "trainers",
    "servers": "servers",
    "samples_per_s": "samples/s",
    "samples_per_s_min": "min",
    "samples_per_s_max": "max",
    "ratio_samples_per_s": "ratio",
    "cpu_us_per_sample": "CPU us/sample",
    "bytes_per_sample": "bytes/sample",
    "waiting_share": "waiting",
    "quality": "AUC",
}


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Returns a row per rate, strategy and peer.

    Raises:
        ValueError: unknown rows or rates, or hosts cannot be made here.
    """
    rows = ctr.select(args)
    if wrong := [name for name, spec in rows.items() if spec.launcher != "torchrun"]:
        raise ValueError(f"expected rows that torchrun starts, found {wrong}")
    data = ctr_data.prepare(ctr_data.CtrSpec(), ctr.CACHE)
    result: list[Row] = []
    for rate in args.rate or DEFAULT_RATES:
        done: dict[str, list[list[Report]]] = {name: [] for name in rows}
        failed: dict[str, str] = {}
        try:
            with hosts(args.trainers + args.servers, rate) as made:
                _collect(rows, args, data, made, done, failed)
        except HostsError as error:
            raise ValueError(f"cannot make hosts here: {error}") from error
        result += _rows(rate, rows, args, done, failed)
    return result


def _collect(
    rows: dict[str, Any],
    args: argparse.Namespace,
    data: Any,
    made: list[Host],
    done: dict[str, list[list[Report]]],
    failed: dict[str, str],
) -> None:
    for round_index in range(args.launches):
        for name, spec in rows.items():
            if name in failed:
                continue
            print(f"round {round_index + 1}: {name}", file=sys.stderr, flush=True)
            with run_folder() as run_dir:
                job = ctr.make_job(name, spec, args, run_dir, data)
                count = job.trainers + job.servers
                try:
                    done[name].append(launch(spec, job, made[:count]))
                except LaunchError as error:
                    print(f"failed: {error}", file=sys.stderr, flush=True)
                    failed[name] = str(error).partition("\n")[0]


def _rows(
    rate: str,
    rows: dict[str, Any],
    args: argparse.Namespace,
    done: dict[str, list[list[Report]]],
    failed: dict[str, str],
) -> list[Row]:
    found: list[Row] = []
    for name, spec in rows.items():
        base = {"case": "network", "rate": rate}
        if name in failed:
            found.append({**base, "name": name, "failed": True, MISSING: failed[name]})
            continue
        row = {**ctr.make_row(name, spec, args, done[name]), **base}
        reports = [report for one in done[name] for report in one]
        seconds = sum(report["seconds"] for report in reports)
        row["waiting_share"] = sum(report["wait_s"] for report in reports) / seconds
        found.append(row)
    add_ratios(found, args.reference or ("ddp" if "ddp" in rows else next(iter(rows))))
    return found
