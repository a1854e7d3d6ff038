# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``ctr``: click-through training of an embedding model, ours beside its peers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ctr_data
from job import Job
from launch import LaunchError, Report, launch, missing_reason, run_folder
from peers import OWN_MODULES, PEERS, PeerSpec, row_name, strategy_row
from report import (
    MISSING,
    Row,
    add_ratios,
    check,
    format_table,
    launch_figures,
    phases_ms,
    spread,
)

CACHE = Path(__file__).resolve().parents[2] / "build" / "benchmarks"
FAILED = "failed"
COLUMNS = {
    "name": "name",
    "trainers": "trainers",
    "servers": "servers",
    "samples_per_s": "samples/s",
    "samples_per_s_min": "min",
    "samples_per_s_max": "max",
    "ratio_samples_per_s": "ratio",
    "cpu_us_per_sample": "CPU us/sample",
    "ratio_cpu_us_per_sample": "ratio",
    "bytes_per_sample": "bytes/sample",
    "rss_mb": "RSS MB",
    "quality": "AUC",
    "verified": "verified",
}


def select(args: argparse.Namespace) -> dict[str, PeerSpec]:
    """Returns the rows asked for, ours first.

    Raises:
        ValueError: a peer is not known, or nothing was asked for.
    """
    rows = {f"cpudist-{name}": strategy_row(name) for name in args.strategies}
    for name in args.peers:
        if name not in PEERS:
            known = ", ".join(PEERS)
            raise ValueError(f"--peers: expected some of {known}; found {name!r}")
        rows[row_name(name)] = PEERS[name]
    if not rows:
        raise ValueError("nothing to run: name --strategies, --peers or both")
    return rows


def make_job(
    name: str, spec: PeerSpec, args: argparse.Namespace, run_dir: str, data: Path
) -> Job:
    """Returns what the workers of one launch are told."""
    return Job(
        name=name,
        module=spec.module,
        strategy=spec.strategy,
        run_dir=run_dir,
        data_dir=str(data),
        trainers=spec.trainers or args.trainers,
        servers=args.servers if spec.servers else 0,
        threads=spec.threads,
        batch=args.batch * max(spec.replicas, 1),
        replicas=max(spec.replicas, 1),
        dim=args.dim,
        lr=args.lr,
        seconds=args.seconds,
        steps=args.steps,
        warmup_steps=args.warmup_steps,
        bf16=args.bf16,
        device=spec.device,
        hidden=args.hidden,
        deadline_s=args.seconds + args.deadline_s,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def collect(
    rows: dict[str, PeerSpec], args: argparse.Namespace, data: Path
) -> tuple[dict[str, list[list[Report]]], dict[str, str]]:
    """Runs rounds A B C, A B C, …; returns reports by row and reasons of absence."""
    done: dict[str, list[list[Report]]] = {name: [] for name in rows}
    absent = {
        name: reason
        for name, spec in rows.items()
        if (reason := missing_reason(spec)) is not None
    }
    for round_index in range(args.launches):
        for name, spec in rows.items():
            if name in absent:
                continue
            load = os.getloadavg()[0]
            _say(f"round {round_index + 1}/{args.launches}, load {load:.1f}: {name}")
            with run_folder() as run_dir:
                job = make_job(name, spec, args, run_dir, data)
                try:
                    done[name].append(launch(spec, job))
                except LaunchError as error:
                    # One broken peer must not cost the others their rounds; the row
                    # says so and the run ends with an error.
                    _say(f"failed: {error}")
                    absent[name] = (
                        f"{FAILED} in round {round_index + 1}: "
                        + str(error).partition("\n")[0]
                    )
    return done, absent


def make_row(
    name: str, spec: PeerSpec, args: argparse.Namespace, launches: list[list[Report]]
) -> Row:
    """Returns the row of one peer from the reports of its launches."""
    row: Row = {
        "case": "ctr",
        "name": name,
        "about": spec.about,
        "trainers": spec.trainers or args.trainers,
        "servers": args.servers if spec.servers else 0,
        "precision": "bf16" if args.bf16 else "fp32",
        "launches": len(launches),
        **spread([launch_figures(reports) for reports in launches]),
    }
    reports = [report for one in launches for report in one]
    row["phases_ms"] = phases_ms(reports)
    if args.verify:
        row["problems"] = sorted(set(check(reports, args.least_quality)))
        row["verified"] = not row["problems"]
    return row


def profile_table(rows: Iterable[Row]) -> str:
    """Returns where a step's milliseconds go, per row."""
    ran = [{**row, **row["phases_ms"]} for row in rows if MISSING not in row]
    names = list(dict.fromkeys(phase for row in ran for phase in row["phases_ms"]))
    columns = {"name": "ms per step"} | {phase: phase for phase in names}
    return format_table(ran, columns)


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Returns one row per strategy and peer; prints the profile if asked for."""
    rows = select(args)
    spec = ctr_data.CtrSpec()
    if not spec.folder(CACHE).is_dir():
        _say("generating the data: once, 171 MB in build/benchmarks, about 10 s")
    data = ctr_data.prepare(spec, CACHE)
    done, absent = collect(rows, args, data)
    result: list[Row] = []
    for name, peer in rows.items():
        if name in absent:
            # A peer may be absent; what this package was asked to run may not.
            failed = peer.module in OWN_MODULES or absent[name].startswith(FAILED)
            row = {"case": "ctr", "name": name, "failed": failed}
            result.append({**row, MISSING: absent[name]})
        else:
            result.append(make_row(name, peer, args, done[name]))
    add_ratios(result, args.reference or next(iter(rows)))
    if args.profile and any(MISSING not in row for row in result):
        print(profile_table(result) + "\n")
    return result
