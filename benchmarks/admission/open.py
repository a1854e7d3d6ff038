# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``open``: what admission to a table without a vocabulary saves, and costs.

Trains examples/criteo/criteo.py with ``--open`` on files in Criteo's format: by default
40 million draws from 200 million possible keys, Zipf(1.05), of which four in five that
come at all come once. Every row is one way to admit keys, each launch in fresh
processes; launches differ by their seed, and rows of a launch do not. ``saved`` is the
memory of the table on all servers, with what counts the keys, against the row in which
every key has a row.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from cases.cnn import FAILED, LaunchFailedError, Layout, launch
from report import MISSING, Row

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "criteo" / "criteo.py"
sys.path.append(str(SCRIPT.parent))

import criteo_data  # noqa: E402

KEYS, EXPONENT = 200_000_000, 1.05
SAMPLES = 40_000_000 // criteo_data.CATEGORIES
PARTS = 4
REFERENCE = "every"
ROWS = (REFERENCE, "count:2", "count:3")
# From this count on, of the data that is the default.
SAVING_COUNT, LEAST_SAVED = 3, 0.8
EQUAL_AUC = 0.001
TRAINING_S_PER_SAMPLE = 1e-3  # many times what it takes
# Options that it has; the example says all else.
USED = {
    *("case", "rows", "strategies", "trainers", "servers", "launches", "batch", "lr"),
    *("epochs", "words", "table_rows", "folder", "deadline_s", "verify", "json"),
}
COLUMNS = {
    "name": "name",
    "rows": "rows",
    "mb": "MB",
    "saved": "saved",
    "filtered": "filtered",
    "evicted": "evicted",
    "auc": "AUC",
    "gap": "gap",
    "samples_per_s": "samples/s",
    "verified": "holds",
}

Launch = dict[str, Any]


def words_of(name: str) -> list[str]:
    """Returns what the row ``name`` adds to the example's command line.

    Raises:
        ValueError: there is no such row.
    """
    if name == REFERENCE:
        return []
    if match := re.fullmatch(r"(count|lru):([1-9]\d*)", name):
        return [{"count": "--count-filter", "lru": "--max-rows"}[match[1]], match[2]]
    raise ValueError(
        f"--rows: expected {', '.join(ROWS)}, count:PUSHES or lru:ROWS, found {name!r}"
    )


class Data:
    """The files that all rows train on, and the part of the command that says so."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.keys = args.table_rows if "table_rows" in args.given else KEYS
        self.samples = args.words or SAMPLES
        self._folder = Path(args.folder or "build").resolve() / "criteo"

    @property
    def default(self) -> bool:
        """Whether it is what the figures of the documentation are of."""
        return (self.keys, self.samples) == (KEYS, SAMPLES)

    def words(self) -> list[str]:
        """The example's options of its files."""
        told = {
            "--data": self._folder,
            "--rows": self.samples,
            "--parts": PARTS,
            "--keys": self.keys,
            "--exponent": EXPONENT,
        }
        return [str(word) for pair in told.items() for word in pair]

    def make(self) -> None:
        """Writes the files unless they are there."""
        keys = criteo_data.Keys(self.keys, EXPONENT)
        criteo_data.prepare(self._folder, self.samples, PARTS, keys=keys)


def command(
    name: str,
    seed: int,
    data: Data,
    layout: Layout,
    args: argparse.Namespace,
    results: Path,
) -> list[str]:
    """Returns the command line of one launch."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc-per-node={layout.trainers + args.servers}", str(layout.script)]
    told = {
        "--strategy": args.strategies[0],
        "--batch-size": args.batch,
        "--epochs": args.epochs,
        "--lr": args.lr,
        "--seed": seed,
        "--results": results,
    }
    words += [str(word) for pair in told.items() for word in pair]
    return [*words, "--open", *data.words(), *words_of(name)]


def make_row(name: str, launches: list[Launch]) -> Row:
    """Returns the row of one way to admit keys: means over its launches."""
    tables = [next(iter(one["tables"].values())) for one in launches]
    return {
        "case": "open",
        "name": name,
        "launches": len(launches),
        "rows": mean(table["rows"] for table in tables),
        "mb": mean(table["bytes"] for table in tables) / 1e6,
        "filtered": mean(table["filtered"] for table in tables),
        "evicted": mean(table["evicted"] for table in tables),
        "ceiling": launches[0]["ceiling"],
        "auc": mean(one["auc"] for one in launches),
        "auc_all": [one["auc"] for one in launches],
        "samples_per_s": mean(one["samples_per_s"] for one in launches),
    }


def compare(rows: Iterable[Row], data: Data, verify: bool) -> None:
    """Adds to every row that ran what it saves, and what that costs."""
    ran = [row for row in rows if MISSING not in row]
    base = next((row for row in ran if row["name"] == REFERENCE), None)
    if base is None:
        return
    for row in ran:
        row["saved"] = 1 - row["mb"] / base["mb"]
        row["gap"] = row["auc"] - base["auc"]
        if not verify or not row["name"].startswith("count:"):
            continue
        row["problems"] = []
        if abs(row["gap"]) > EQUAL_AUC:
            row["problems"].append(
                f"AUC {row['auc']:.4f}, with every key {base['auc']:.4f}: expected at "
                f"most {EQUAL_AUC:g} between"
            )
        count = int(row["name"].partition(":")[2])
        if data.default and count >= SAVING_COUNT and row["saved"] < LEAST_SAVED:
            row["problems"].append(
                f"saves {row['saved']:.1%} of the memory: expected {LEAST_SAVED:.0%}"
            )
        row["verified"] = not row["problems"]


def _check(args: argparse.Namespace) -> list[str]:
    if wrong := sorted(args.given - USED):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"open: {names} would change nothing")
    if len(args.strategies) != 1:
        raise ValueError(f"--strategies: expected one, found {args.strategies}")
    names = list(dict.fromkeys(args.rows or ROWS))
    for name in names:
        words_of(name)
    return names


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _collect(
    names: list[str], layout: Layout, data: Data, args: argparse.Namespace
) -> tuple[dict[str, list[Launch]], dict[str, Row]]:
    """Runs rounds A B C, A B C; returns launches by row, and rows that failed."""
    done: dict[str, list[Launch]] = {name: [] for name in names}
    failed: dict[str, Row] = {}
    for seed in range(1, args.launches + 1):
        for name in (one for one in names if one not in failed):
            _say(f"round {seed}/{args.launches}: {name}")
            try:
                words = partial(command, name, seed, data)
                done[name].append(launch(layout, args, words))
            except LaunchFailedError as error:
                _say(f"{name}: {error}")
                reason = f"{FAILED}: {error}".partition("\n")[0]
                about = {"case": "open", "name": name, "failed": True}
                failed[name] = {**about, MISSING: reason}
    return done, failed


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per way to admit keys."""
    names, data = _check(args), Data(args)
    _say("writing files, unless they are there")
    data.make()
    variables: Mapping[str, str] = {"CPUDIST_SERVERS": str(args.servers)}
    layout = Layout(
        SCRIPT, "examples/criteo --open", args.trainers, variables=variables
    )
    limit_s = args.deadline_s + TRAINING_S_PER_SAMPLE * data.samples
    epochs = args.epochs if "epochs" in args.given else 1
    told = {**vars(args), "epochs": epochs, "deadline_s": limit_s}
    done, failed = _collect(names, layout, data, argparse.Namespace(**told))
    rows = [
        failed[name] if name in failed else make_row(name, done[name]) for name in names
    ]
    compare(rows, data, args.verify)
    return rows
