# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The case ``word2vec`` between hosts with a slow network: ``--rate``.

Every trainer is alone on a host of its own (a network namespace) behind a switch and
serves there, too; every host has a torchrun of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hosts import INTERFACE, Host
from launch import MASTER_PORT, run_folder
from report import MISSING, Row

from cases.cnn import (
    FAILED,
    Launch,
    LaunchFailedError,
    Layout,
    environment,
    run_together,
)

ROWS = (
    *("ddp", "sync", "half_async", "async"),
    *("geo:push_every=50", "geo:push_every=100", "geo:push_every=400"),
)
# Returns the command line of a host, whose torchrun has these options.
Command = Callable[[Layout, Path, str, Sequence[str]], list[str]]
Chosen = Mapping[str, tuple[Layout, str]]


def check(chosen: Chosen, args: argparse.Namespace) -> None:
    """Refuses rows and options that are not for several hosts.

    Raises:
        ValueError: which, and why.
    """
    if wrong := [name for name, (layout, _) in chosen.items() if not layout.torchrun]:
        raise ValueError(
            f"--rows with --rate: expected rows that torchrun starts, found {wrong}"
        )
    if args.servers:
        raise ValueError("word2vec has no --servers: every trainer serves")


def commands(
    layout: Layout, optimizer: str, results: Path, made: list[Host], command: Command
) -> list[list[str]]:
    """Returns the command line that each host is started with."""
    meeting = [f"--nnodes={len(made)}", f"--master-addr={made[0].address}"]
    meeting += [f"--master-port={MASTER_PORT}"]
    return [
        host.command(
            command(
                layout, results, optimizer, [*meeting, f"--node-rank={host.number}"]
            )
        )
        for host in made
    ]


def on_hosts(layout: Layout) -> dict[str, str]:
    """Returns the environment of a row; hosts do not share memory."""
    network = {"CPUDIST_BACKEND": "gloo", "GLOO_SOCKET_IFNAME": INTERFACE}
    return {**environment(layout), **network}


def collect(
    chosen: Chosen, args: argparse.Namespace, made: list[Host], command: Command
) -> tuple[dict[str, list[Launch]], dict[str, Row]]:
    """Runs rounds A B C, A B C, …; returns launches by row, and rows that failed."""
    done: dict[str, list[Launch]] = {name: [] for name in chosen}
    absent: dict[str, Row] = {}
    limit_s = args.deadline_s * args.epochs
    for round_index in range(args.launches):
        for name, (layout, optimizer) in chosen.items():
            if name in absent:
                continue
            load = os.getloadavg()[0]
            said = f"round {round_index + 1}/{args.launches}, load {load:.1f}: {name}"
            print(said, file=sys.stderr, flush=True)
            with run_folder() as folder:
                results = Path(folder) / "results.json"
                words = commands(layout, optimizer, results, made, command)
                try:
                    found = run_together(words, on_hosts(layout), results, limit_s)
                    done[name].append(found)
                except LaunchFailedError as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                    reason = f"{FAILED}: {error}".partition("\n")[0]
                    absent[name] = {
                        **{"case": "word2vec", "name": name},
                        **{"failed": True, MISSING: reason},
                    }
    return done, absent


def waiting_share(launches: Sequence[Launch], trainers: int) -> float | None:
    """Returns the share of the trainers' time that they waited, where a row says it."""
    if any(one["strategy"] == "DDP over gloo" for one in launches):
        return None  # its wait is inside backward
    seconds = sum(one["seconds"] for one in launches)
    return float(sum(one["wait_s"] for one in launches) / (trainers * seconds))
