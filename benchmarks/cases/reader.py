# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``reader``: from text files to batches of tensors, rows per second of CPU time.

Every row is a fresh process on one core, in turn with the others. Criteo: 13 numbers
with 0 for missing ones, 26 values of 8 hexadecimal digits as integers; MultiSlot: the
same records, in decimal. pyarrow splits
cells and does not parse the hexadecimal ones. ``two threads`` has two cores, ``epochs``
reads the file as often as ``--epochs`` says and reports how memory grew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from report import MISSING, Row

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / "build" / "benchmarks"
OURS = ("criteo", "two threads", "in memory", "multislot", "epochs")
PEERS = ("polars", "pandas", "pyarrow")
COLUMNS = {
    "name": "name",
    "rows_per_s": "rows/s",
    "rows_per_cpu_s": "rows/s of CPU",
    "mb_per_cpu_s": "MB/s of CPU",
    "ratio": "ratio",
    "rss_mb": "RSS, MB",
    "grown_mb": "grown, MB",
}
ROWS = 400_000


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Returns a row per reader; ratios are of rows per CPU second to the first.

    Raises:
        ValueError: an unknown peer.
    """
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        raise ValueError(f"expected peers of {', '.join(PEERS)}, found {unknown}")
    names = [*OURS, *(args.peers or PEERS)]
    _command(args, "prepare")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.launches):
        for name in names:
            found[name].append(_command(args, name))
    rows = [_row(name, reports) for name, reports in found.items()]
    base = rows[0].get("rows_per_cpu_s")
    for row in rows:
        if base and MISSING not in row:
            row["ratio"] = row["rows_per_cpu_s"] / base
    return rows


def _command(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """What one process reports."""
    command = [sys.executable, str(HERE / "reader_worker.py"), name]
    command += [str(CACHE / "reader"), str(ROWS), str(args.batch), str(args.epochs)]
    cores = sorted(os.sched_getaffinity(0))[: 2 if name == "two threads" else 1]
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, cores)), *command],
        capture_output=True,
        text=True,
        timeout=args.deadline_s * 5,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
    )
    if done.returncode == 3:
        return {MISSING: done.stderr.strip().splitlines()[-1]}
    if done.returncode != 0:
        raise ValueError(f"reader {name} failed:\n{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _row(name: str, reports: list[dict[str, Any]]) -> Row:
    if MISSING in reports[0]:
        return {"case": "reader", "name": name, MISSING: reports[0][MISSING]}
    row: Row = {"case": "reader", "name": name}
    for key in reports[0]:
        values = [report[key] for report in reports]
        row[key] = median(values)
        row[f"{key}_min"], row[f"{key}_max"] = min(values), max(values)
    return row
