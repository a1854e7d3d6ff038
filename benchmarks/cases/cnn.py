# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``cnn``: a small convolutional network on Fashion-MNIST, by all cores.

Every row makes the same steps: batches of ``--batch`` pictures of all processes or
replicas together, in the same order. So what is compared is the time of an epoch, at an
accuracy that has to be that of the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from launch import LOG_TAIL_LINES, POLL_S, run_folder, running
from report import MISSING, Row

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "examples" / "fashion_mnist" / "fashion_mnist.py"
TORCH = ROOT / "benchmarks" / "peers" / "cnn_torch.py"
ROWS = (
    *("torch1", "torch2", "ddp", "allreduce-gloo", "allreduce-shm", "allreduce-ccl"),
    "replicas",
)
BACKENDS = ("gloo", "shm", "ccl")
# Accuracies of equal training differ by rounding, which moves a few of 10,000 pictures.
EQUAL_ACCURACY = 0.01
FAILED = "failed"
UNAVAILABLE = re.compile(r"BackendUnavailableError: (.*)")
COLUMNS = {
    "name": "name",
    "trainers": "processes",
    "replicas": "replicas",
    "threads": "threads each",
    "epoch_s": "s/epoch",
    "epoch_s_min": "min",
    "epoch_s_max": "max",
    "speedup": "speedup",
    "cpu_s": "CPU s/epoch",
    "accuracy": "accuracy",
    "verified": "equal accuracy",
}

Launch = dict[str, Any]
Command = Callable[["Layout", argparse.Namespace, Path], list[str]]
Reader = Callable[[Path], Launch]


@dataclass(frozen=True)
class Layout:
    """How a row is started."""

    script: Path
    about: str
    trainers: int = 1
    replicas: int = 1
    threads: int = 1
    torchrun: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


class LaunchFailedError(Exception):
    """A launch ended badly; ``unavailable`` is the reason if a backend is missing."""

    def __init__(self, message: str, unavailable: str | None = None) -> None:
        super().__init__(message)
        self.unavailable = unavailable


def layout_of(name: str, count: int) -> Layout:
    """Returns how the row ``name`` is run with ``count`` processes or replicas.

    Raises:
        ValueError: there is no such row.
    """
    if name == "ddp":
        about = "DistributedDataParallel over gloo"
        return Layout(TORCH, about, trainers=count, torchrun=True)
    if name == "replicas":
        return Layout(
            OURS,
            "this package, replicas of one process",
            replicas=count,
            variables={"CPU_NUM": str(count), "CPUDIST_REPLICAS_NUM_THREADS": "1"},
        )
    if match := re.fullmatch(r"torch([1-9]\d{0,2})", name):
        threads = int(match[1])
        about = f"one process, {threads} thread(s) of torch's"
        return Layout(TORCH, about, threads=threads)
    strategy, _, backend = name.rpartition("-")
    if not strategy or backend not in BACKENDS:
        raise ValueError(
            f"--rows: expected some of {', '.join(ROWS)}, torchTHREADS or "
            f"STRATEGY-BACKEND with {', '.join(BACKENDS)}; found {name!r}"
        )
    return Layout(
        OURS,
        f"this package, {strategy} over {backend}",
        trainers=count,
        torchrun=True,
        variables={"CPUDIST_STRATEGY": strategy, "CPUDIST_BACKEND": backend},
    )


def select(args: argparse.Namespace) -> dict[str, Layout]:
    """Returns the rows that were asked for, in that order.

    Raises:
        ValueError: one is not known, or the batch cannot be shared evenly.
    """
    rows = {name: layout_of(name, args.trainers) for name in args.rows or ROWS}
    if args.batch % args.trainers:
        raise ValueError(
            f"--batch is that of all processes together: expected a multiple of "
            f"--trainers {args.trainers}, found {args.batch}"
        )
    if args.reference and args.reference not in rows:
        known = ", ".join(rows)
        raise ValueError(
            f"--reference: expected one of {known}; found {args.reference!r}"
        )
    return rows


def command(layout: Layout, args: argparse.Namespace, results: Path) -> list[str]:
    """Returns the command line of one launch."""
    start = [sys.executable]
    if layout.torchrun:
        start += ["-m", "torch.distributed.run", "--standalone"]
        start += [f"--nproc-per-node={layout.trainers}"]
    told = ["--epochs", args.epochs, "--batch-size", args.batch, "--results", results]
    if args.data is not None:
        told += ["--data", Path(args.data).resolve()]
    precision = ["--bf16"] if args.bf16 else []
    return [*start, str(layout.script), *map(str, told), *precision]


def environment(layout: Layout) -> dict[str, str]:
    """Returns the caller's environment without its own launch and settings."""
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in (*outer, "CPU_NUM") and not name.startswith("CPUDIST_")
    }
    threads = str(layout.threads)
    fixed = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ours = {"CPUDIST_THREADS": threads, "PYTHONPATH": path}
    return {**kept, **fixed, **ours, **layout.variables}


def read_json(path: Path) -> Launch:
    """Returns what trainer 0 wrote, as one JSON object."""
    found: Launch = json.loads(path.read_text())
    return found


def launch(
    layout: Layout,
    args: argparse.Namespace,
    words_of: Command | None = None,
    read: Reader = read_json,
) -> Launch:
    """Runs one launch in fresh processes and returns what trainer 0 wrote.

    ``words_of`` returns its command line; None: ``command``. ``read`` reads its file.

    Raises:
        LaunchFailedError: a process failed, or was not done in time.
    """
    limit_s = args.deadline_s * args.epochs
    with run_folder() as folder:
        results = Path(folder) / "results.json"
        words = (words_of or command)(layout, args, results)
        return run_together([words], environment(layout), results, limit_s, read)


def run_together(
    commands: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    results: Path,
    limit_s: float,
    read: Reader = read_json,
) -> Launch:
    """Runs commands side by side in the folder of ``results``; returns what it holds.

    Raises:
        LaunchFailedError: one failed, or was not done in time; the others are ended.
    """
    log_path = results.with_name("output.txt")
    with running(commands, variables, log_path) as processes:
        code = _wait(processes, limit_s)
    if code != 0 or not results.exists():
        raise failure_of(code, limit_s, log_path.read_text(errors="replace"))
    return read(results)


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> int | None:
    """Returns the first code that is not 0, 0 if all ended well, None: not in time."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        codes = [process.poll() for process in processes]
        bad = next((code for code in codes if code), None)
        if bad is not None or None not in codes:
            return bad or 0
        time.sleep(POLL_S)
    return None


def failure_of(code: int | None, limit_s: float, text: str) -> LaunchFailedError:
    if unavailable := UNAVAILABLE.search(text):
        return LaunchFailedError(unavailable[0], unavailable[1])
    said = f"not done after {limit_s:g} s"
    if code is not None:
        said = f"ended with {signal.Signals(-code).name if code < 0 else code}"
    # What torchrun adds below its ranks' own words names no cause.
    ours, torchruns, _ = text.partition("torch/distributed/elastic")
    words = ours.splitlines()[:-1] if torchruns else ours.splitlines()
    last = next((f": {line.strip()}" for line in reversed(words) if line.strip()), "")
    shown = "\n    ".join(words[-LOG_TAIL_LINES:])
    return LaunchFailedError(f"{said}{last}\n    {shown}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def collect(
    rows: Mapping[str, Layout],
    args: argparse.Namespace,
    words_of: Command | None = None,
) -> tuple[dict[str, list[Launch]], dict[str, Row]]:
    """Runs rounds A B C, A B C, …; returns launches by row, and rows that cannot be.

    ``words_of`` as of ``launch``.
    """
    done: dict[str, list[Launch]] = {name: [] for name in rows}
    absent: dict[str, Row] = {}
    for round_index in range(args.launches):
        for name, layout in rows.items():
            if name in absent:
                continue
            load = os.getloadavg()[0]
            _say(f"round {round_index + 1}/{args.launches}, load {load:.1f}: {name}")
            try:
                done[name].append(launch(layout, args, words_of))
            except LaunchFailedError as error:
                _say(f"{name}: {error}")
                reason = error.unavailable or f"{FAILED}: {error}".partition("\n")[0]
                absent[name] = {
                    **{"case": args.case, "name": name, MISSING: reason},
                    "failed": error.unavailable is None,
                }
    return done, absent


def make_row(
    name: str, layout: Layout, args: argparse.Namespace, launches: list[Launch]
) -> Row:
    """Returns the row of one layout: medians over all epochs of all launches."""
    epochs = [epoch for one in launches for epoch in one["epochs"]]
    seconds = [epoch["seconds"] for epoch in epochs]
    # Trainers do the same work: trainer 0's CPU time stands for each of them.
    cpu_s = [epoch["cpu_s"] * layout.trainers for epoch in epochs]
    accuracies = [one["epochs"][-1]["accuracy"] for one in launches]
    return {
        "case": "cnn",
        "name": name,
        "about": layout.about,
        "trainers": layout.trainers,
        "replicas": layout.replicas,
        "threads": layout.threads,
        "batch": args.batch,
        "epochs": args.epochs,
        "precision": "bf16" if args.bf16 else "fp32",
        "launches": len(launches),
        "epoch_s": median(seconds),
        "epoch_s_min": min(seconds),
        "epoch_s_max": max(seconds),
        "cpu_s": median(cpu_s),
        "accuracy": median(accuracies),
        "accuracy_min": min(accuracies),
        "accuracy_max": max(accuracies),
        "accuracy_by_epoch": [
            median(one["epochs"][epoch]["accuracy"] for one in launches)
            for epoch in range(args.epochs)
        ],
    }


def compare(rows: Iterable[Row], reference: str, verify: bool) -> None:
    """Adds to every row that ran its speedup and whether it is as accurate."""
    ran = [row for row in rows if MISSING not in row]
    base = next((row for row in ran if row["name"] == reference), None)
    for row in ran:
        row["reference"] = reference if base else None
        row["speedup"] = base["epoch_s"] / row["epoch_s"] if base else None
        if not verify or base is None:
            continue
        gap = row["accuracy"] - base["accuracy"]
        row["problems"] = []
        if abs(gap) > EQUAL_ACCURACY:
            row["problems"] = [
                f"accuracy {row['accuracy']:.4f}, {reference} has "
                f"{base['accuracy']:.4f}: expected at most {EQUAL_ACCURACY:g} between"
            ]
        row["verified"] = not row["problems"]


def run(args: argparse.Namespace) -> Iterable[Row]:
    """Returns a row per layout."""
    rows = select(args)
    done, absent = collect(rows, args)
    result = [
        absent[name] if name in absent else make_row(name, layout, args, done[name])
        for name, layout in rows.items()
    ]
    compare(result, args.reference or next(iter(rows)), args.verify)
    return result
