# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``threads``: what idle cores and more threads than cores cost.

Training of ``ctr``'s model in plain torch: one process with more and more threads, then
as many processes as cores, each with one thread and with more, strangers to each other.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

import ctr_data
from peers import PeerSpec
from report import MISSING, Row, add_ratios

from cases import ctr

COLUMNS = {
    "name": "name",
    "threads": "threads of all",
    "samples_per_s": "samples/s",
    "samples_per_s_min": "min",
    "samples_per_s_max": "max",
    "ratio_samples_per_s": "ratio",
    "cpu_us_per_sample": "CPU us/sample",
    "ratio_cpu_us_per_sample": "ratio",
}


def layouts(cores: int) -> list[tuple[int, int]]:
    """Processes and threads of each, from idle cores to four threads per core."""
    found = [(1, 1), (1, cores), (1, 2 * cores)]
    found += [(cores, 1), (cores, 2), (cores, 4)]
    return list(dict.fromkeys(found))


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Returns a row per layout.

    Raises:
        ValueError: a layout failed.
    """
    cores = len(os.sched_getaffinity(0))
    rows = {
        f"{processes} x {threads}": PeerSpec(
            "torch_single",
            f"{processes} processes of {threads} threads",
            "plain",
            processes,
            threads,
        )
        for processes, threads in layouts(cores)
    }
    data = ctr_data.prepare(ctr_data.CtrSpec(), ctr.CACHE)
    done, absent = ctr.collect(rows, args, data)
    result: list[Row] = []
    for name, spec in rows.items():
        if name in absent:
            raise ValueError(absent[name])
        row = ctr.make_row(name, spec, args, done[name])
        row["case"], row["threads"] = "threads", spec.trainers * spec.threads
        result.append(row)
    add_ratios(result, args.reference or f"{cores} x 1")
    return [row for row in result if MISSING not in row]
