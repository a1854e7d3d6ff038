# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws the runs of the case ``convergence`` and prints tables for the docs.

python benchmarks/run.py convergence --data ... --text ... --epochs 1
python benchmarks/plot_convergence.py build/convergence.jsonl docs/images

Needs matplotlib: ``pip install -e .[plot]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from cases.convergence import LEAST_BAR, Record, noise, read_runs, rows_of
from convergence_plan import (
    BATCH,
    GEO_BATCH,
    INTERVALS,
    ONE,
    OTHER_BATCHES,
    PARTS,
    PUSH_EVERY,
    TRAINERS,
    WORKLOADS,
    Run,
    plan,
)
from convergence_plan import rows_of as rows_of_plan
from report import Row

QUALITY = {"flights": "test AUC", "word2vec": "rho on WordSim-353"}
CURVE = {"flights": ("auc", "test AUC"), "word2vec": ("loss", "training loss")}
SAMPLES = {"flights": "samples", "word2vec": "words"}
CURVES_OF = 2  # trainers
COLORS = {
    name: f"C{i}"
    for i, name in enumerate(
        (
            *("sync", "half_async:group", "async", "geo", "allreduce", "reduce"),
            *("hybrid", "hybrid:dense"),
        )
    )
}
HEADINGS = (
    *("strategy", "trainers", "batch", "quality (least to most)", "gap", "bar"),
    *("holds", "loss", "samples/s", "bytes/sample", "late by (steps)"),
)

Records = dict[Run, Record]


def cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a row of a table."""

    def number(value: float | None, digits: int, sign: str = "") -> str:
        return "-" if value is None else f"{value:{sign},.{digits}f}"

    values = row["quality_all"]
    quality = number(row["quality"], 4)
    if len(values) > 1:
        quality += f" ({min(values):.4f} to {max(values):.4f})"
    holds = {True: "yes", False: "**no**", None: "-"}[row.get("verified")]
    return (
        f"`{row['name']}`",
        str(row["trainers"]),
        str(row["batch"]),
        quality,
        number(row.get("gap"), 4, "+"),
        number(row["bar"], 4),
        holds,
        number(row["loss"], 4),
        number(row["samples_per_s"], 0),
        number(row["bytes_per_sample"], 0),
        number(row["staleness"], 2),
    )


def table(rows: Iterable[Row]) -> str:
    """Returns a Markdown table."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def average(records: Sequence[Record], value: str) -> tuple[list[float], ...]:
    """Returns samples, seconds and ``value`` by point.

    Samples and values are means over runs; seconds are those of the fastest run.
    """
    least = min(len(record["points"]) for record in records)
    fastest = max(records, key=lambda record: record["samples_per_s"])
    samples, values = (
        [mean(record["points"][i][name] for record in records) for i in range(least)]
        for name in ("samples", value)
    )
    seconds = [point["seconds"] for point in fastest["points"][:least]]
    return samples, seconds, values


def _chosen(records: Records, **wanted: Any) -> dict[str, list[Record]]:
    """Returns the records with these fields, by row."""
    found: dict[str, list[Record]] = {}
    for run, record in records.items():
        if all(getattr(run, name) == value for name, value in wanted.items()):
            found.setdefault(run.row, []).append(record)
    return found


def draw_curves(records: Records, axes: Any) -> None:
    """Draws what was learned, over samples and over seconds, a line per strategy."""
    for line, workload in enumerate(WORKLOADS):
        value, label = CURVE[workload]
        plain = {"batch": BATCH[workload], "workload": workload}
        plain |= {"optimizer": "adagrad", "merge": "sum"}
        shown_rows = set(rows_of_plan(workload, CURVES_OF))
        one = _chosen(records, row="sync", trainers=1, **plain)
        several = _chosen(records, trainers=CURVES_OF, **plain)
        several = {row: several[row] for row in several if row in shown_rows}
        shown = {"one process": one.get("sync", []), **several}
        for name, found in shown.items():
            if not found:
                continue
            samples, seconds, values = average(found, value)
            style = "--" if name == "one process" else "-"
            color = COLORS.get(name.partition("=")[0], "k")
            for axis, places in zip(axes[line], (samples, seconds), strict=True):
                axis.plot(places, values, style, color=color, label=name)
        axes[line][0].set(xlabel=SAMPLES[workload], ylabel=f"{workload}: {label}")
        axes[line][1].set(xlabel="seconds of training", ylabel=label)
        if axes[line][1].lines:
            axes[line][1].legend(fontsize="x-small")


def draw_staleness(records: Records, axes: Any) -> None:
    """Draws by how many updates pushes of Async were late, as shares of them."""
    for axis, workload in zip(axes, WORKLOADS, strict=True):
        for trainers in TRAINERS:
            plain = {"workload": workload, "batch": BATCH[workload]}
            found = _chosen(records, row="async", trainers=trainers, **plain)
            counts: Counter[str] = Counter()
            for record in found.get("async", []):
                counts.update(record["staleness"]["steps"])
            total = sum(counts.values())
            if not total:
                continue
            names = sorted(counts, key=lambda name: int(name.partition("-")[0]))
            shares = [counts[name] / total for name in names]
            axis.plot(names, shares, "o-", label=f"{trainers} trainer(s)")
        axis.set(xlabel=f"{workload}: Async, updates late", ylabel="share of pushes")
        axis.tick_params(axis="x", labelrotation=45)
        if axis.lines:
            axis.legend(fontsize="small")


def draw_batches(records: Records, axes: Any) -> None:
    """Draws quality against trainers x batch of a trainer, a line per strategy."""
    for axis, workload in zip(axes, WORKLOADS, strict=True):
        for row in ("sync", "async", "geo"):
            places = []
            for batch in (*OTHER_BATCHES, BATCH[workload]):
                for trainers in TRAINERS:
                    run = Run(workload, row, trainers, batch, 1)
                    if run in records and records[run]["quality"] is not None:
                        together = batch if workload == "flights" else batch * trainers
                        quality = records[run]["quality"]
                        places.append((together, quality, trainers))
            for trainers, marker in zip(TRAINERS, "osx", strict=True):
                mine = sorted(place[:2] for place in places if place[2] == trainers)
                if mine:
                    color = {"sync": "C0", "async": "C1", "geo": "C2"}[row]
                    label = f"{row}, {trainers}"
                    axis.plot(*zip(*mine, strict=True), marker + "-", c=color, lw=0.8)
                    axis.lines[-1].set_label(label)
        axis.set_xscale("log", base=2)
        unit = SAMPLES[workload]
        axis.set(xlabel=f"{unit} of a step, all trainers", ylabel=QUALITY[workload])
        axis.set_title(workload, fontsize="medium")
        if axis.lines:
            axis.legend(fontsize="x-small", ncols=3)


def _is_scored(record: Record) -> bool:
    return record["quality"] is not None


def draw_geo(records: Records, axes: Any) -> None:
    """Draws quality and bytes of Geo over the steps between exchanges."""
    for axis, workload in zip(axes, WORKLOADS, strict=True):
        plain = {"workload": workload, "batch": GEO_BATCH[workload]}
        found = {
            every: _chosen(records, row=f"geo:push_every={every}", **plain)
            for every in PUSH_EVERY
        }
        # Without WordSim-353 no quality is known.
        scored = {
            every: [one for row in rows.values() for one in row if _is_scored(one)]
            for every, rows in found.items()
        }
        sweep = {every: rows for every, rows in scored.items() if rows}
        if not sweep:
            continue
        steps = list(sweep)
        quality = [mean(r["quality"] for r in rows) for rows in sweep.values()]
        moved = [mean(r["bytes_per_sample"] for r in rows) for rows in sweep.values()]
        axis.plot(steps, quality, "o-", color="C0")
        if one := _chosen(records, row="sync", trainers=1, **plain).get("sync"):
            levels = [record["quality"] for record in one if _is_scored(record)]
            if levels:
                axis.axhline(mean(levels), color="0.5", ls="--", label="one process")
                axis.legend(fontsize="small")
        axis.set_xscale("log")
        axis.set(xlabel=f"{workload}: push_every", ylabel=QUALITY[workload])
        right = axis.twinx()
        right.plot(steps, moved, "x:", color="C1")
        right.set_yscale("log")
        right.set_ylabel(f"bytes per {SAMPLES[workload][:-1]}", color="C1")


def _qualities(found: Iterable[Record]) -> list[float]:
    return [record["quality"] for record in found if _is_scored(record)]


def draw_intervals(records: Records, axes: Any) -> None:
    """Draws quality of Geo over its intervals beside one process and its bar.

    The first place is the default, which grows with the steps made; each mark is a run,
    each line a mean.
    """
    names = {"geo": "None"}
    names |= {f"geo:push_every={every}": str(every) for every in INTERVALS}
    for axis, workload in zip(axes, WORKLOADS, strict=True):
        plain = {"workload": workload, "batch": BATCH[workload]}
        plain |= {"optimizer": "adagrad", "merge": "sum"}
        for trainers, color in zip(TRAINERS[1:], ("C0", "C1"), strict=True):
            found = _chosen(records, trainers=trainers, **plain)
            runs = {
                place: values
                for place, row in enumerate(names)
                if (values := _qualities(found.get(row, [])))
            }
            if not runs:
                continue
            marks = [(place, one) for place, values in runs.items() for one in values]
            label = f"{trainers} trainers"
            axis.plot(*zip(*marks, strict=True), "o", ms=4, c=color, label=label)
            axis.plot(list(runs), [mean(one) for one in runs.values()], c=color, lw=0.8)
        one = _chosen(records, row=ONE, trainers=1, **plain).get(ONE, [])
        if levels := _qualities(one):
            axis.axhline(mean(levels), color="0.5", ls="--", label="one process")
            sigma = noise(records, Run(workload, ONE, 1, BATCH[workload], 0))
            if sigma is not None:
                least = mean(levels) - max(LEAST_BAR, 2 * sigma)
                axis.axhline(least, color="0.5", ls=":", label="bar")
        axis.set_xticks(range(len(names)), list(names.values()))
        axis.set(xlabel=f"{workload}: push_every", ylabel=QUALITY[workload])
        if axis.lines:
            axis.legend(fontsize="small")


def draw(records: Records, folder: Path) -> list[Path]:
    """Draws every picture of which there are runs and returns where they are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "curves": (draw_curves, 2, (11, 8)),
        "staleness": (draw_staleness, 1, (11, 4)),
        "batches": (draw_batches, 1, (11, 4)),
        "geo": (draw_geo, 1, (11, 4)),
        "intervals": (draw_intervals, 1, (11, 4)),
    }
    written = []
    for name, (paint, lines, size) in pictures.items():
        figure, axes = plt.subplots(lines, 2, figsize=size, layout="constrained")
        paint(records, axes)
        # An empty one would replace that of a study with more parts.
        if any(line.get_xdata().size for axis in figure.axes for line in axis.lines):
            written.append(folder / f"convergence_{name}.png")
            figure.savefig(written[-1], dpi=90)
        plt.close(figure)
    return written


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="file that run.py convergence kept")
    parser.add_argument("folder", type=Path, help="of the PNGs to write")
    parser.add_argument("--seeds", type=int, default=3, help="of each cell")
    options = parser.parse_args(arguments)
    lines = options.runs.read_text("utf-8").splitlines()
    if not lines:
        sys.exit(f"{options.runs}: expected runs of `run.py convergence`, found none")
    first = json.loads(lines[0])
    records = read_runs(options.runs, first["epochs"], first["words"])
    commits = sorted({str(record.get("commit")) for record in records.values()})
    if len(commits) > 1:
        print(f"runs of different code: commits {', '.join(commits)}", file=sys.stderr)
    for path in draw(records, options.folder):
        print(f"picture: {path}", file=sys.stderr)
    for part in PARTS:
        for workload in WORKLOADS:
            if rows := rows_of(plan(part, workload, options.seeds), records):
                print(f"\n### {part}, {workload}\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
