# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``lookups``: what asking for all rows of a forward at once is worth on a link.

The model of the case ``ctr`` with a table for each slot, 26 lookups a step. Each
trainer and server is a host of its own behind a link with ``--delay-ms`` each way, a
process that passes frames (``delayed.py``); with 0 they are processes of one host.
``alone`` are rows in which each lookup asks for itself; ratios are to them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ctr_data
from delayed import delayed_hosts
from hosts import Host, HostsError
from launch import LaunchError, Report, launch, run_folder
from peers import PeerSpec
from report import MISSING, Row, add_ratios

from cases import ctr

DEFAULT_DELAYS = ("0", "0.2", "1")
WAYS = {"alone": "false", "together": "true"}
COLUMNS = {
    "delay_ms": "delay ms",
    "name": "name",
    "trainers": "trainers",
    "servers": "servers",
    "samples_per_s": "samples/s",
    "samples_per_s_min": "min",
    "samples_per_s_max": "max",
    "ratio_samples_per_s": "ratio",
    "cpu_us_per_sample": "CPU us/sample",
    "ms_per_step": "ms/step",
    "quality": "AUC",
}


@contextlib.contextmanager
def _placed(count: int, delay_ms: float) -> Iterator[Sequence[Host]]:
    if not delay_ms:
        yield ()
        return
    with delayed_hosts(count, delay_ms) as made:
        yield made


def _specs(strategy: str) -> dict[str, PeerSpec]:
    return {
        f"{strategy} {way}": PeerSpec(
            "cpudist_tables",
            f"lookups ask {way}",
            "torchrun",
            strategy=f"{strategy}:learn_lookups={value}",
            servers=True,
        )
        for way, value in WAYS.items()
    }


def run(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Returns two rows per delay and strategy.

    Raises:
        ValueError: hosts cannot be made here, or a delay is no number.
    """
    data = ctr_data.prepare(ctr_data.CtrSpec(), ctr.CACHE)
    result: list[Row] = []
    for delay in args.delay_ms or DEFAULT_DELAYS:
        for strategy in args.strategies:
            specs = _specs(strategy)
            try:
                with _placed(args.trainers + args.servers, float(delay)) as made:
                    done = _collect(specs, args, data, made)
            except (HostsError, LaunchError) as error:
                raise ValueError(f"delay {delay}, {strategy}: {error}") from error
            result += _rows(delay, specs, args, done)
    return result


def _collect(
    specs: dict[str, PeerSpec],
    args: argparse.Namespace,
    data: Any,
    made: Sequence[Host],
) -> dict[str, list[list[Report]]]:
    """Runs A B, A B, …"""
    done: dict[str, list[list[Report]]] = {name: [] for name in specs}
    for round_index in range(args.launches):
        for name, spec in specs.items():
            print(f"round {round_index + 1}: {name}", file=sys.stderr, flush=True)
            with run_folder() as run_dir:
                job = ctr.make_job(name, spec, args, run_dir, data)
                done[name].append(launch(spec, job, made))
    return done


def _rows(
    delay: str,
    specs: dict[str, PeerSpec],
    args: argparse.Namespace,
    done: dict[str, list[list[Report]]],
) -> list[Row]:
    found: list[Row] = []
    for name, spec in specs.items():
        row = {**ctr.make_row(name, spec, args, done[name]), "case": "lookups"}
        row |= {"delay_ms": float(delay)}
        batch = args.batch * args.trainers
        row["ms_per_step"] = 1000 * batch / row["samples_per_s"]
        found.append(row)
    add_ratios([row for row in found if MISSING not in row], found[0]["name"])
    return found
