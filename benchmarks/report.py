# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of a benchmark: medians over launches, ratios to a reference, table, JSON."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]

# What is reported as median, minimum and maximum over the launches.
SPREAD = ("samples_per_s", "cpu_us_per_sample", "bytes_per_sample", "rss_mb", "quality")
RATIOS = ("samples_per_s", "cpu_us_per_sample")
MISSING = "missing"


def launch_figures(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Joins the reports of one launch's trainers into the figures of a row."""
    samples = sum(r["samples"] for r in reports)
    return {
        "samples_per_s": samples / max(r["seconds"] for r in reports),
        "cpu_us_per_sample": 1e6 * sum(r["cpu_s"] for r in reports) / samples,
        "bytes_per_sample": sum(r["bytes"] for r in reports) / samples,
        "rss_mb": sum(r["rss_mb"] for r in reports),
        "quality": sum(r["quality"] for r in reports) / len(reports),
    }


def check(reports: Sequence[Mapping[str, Any]], least_quality: float) -> list[str]:
    """Returns what speaks against a result: the loss did not fall, quality too low."""
    problems = []
    for report in reports:
        first, last = report["loss_first"], report["loss_last"]
        trainer = f"trainer {report['rank']}"
        if not last < first:
            problems.append(f"{trainer}: loss went from {first:.4f} to {last:.4f}")
        if not report["quality"] >= least_quality:
            found = f"{report['quality']:.4f}"
            problems.append(f"{trainer}: AUC {found}, expected {least_quality:g}")
    return problems


def phases_ms(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the mean milliseconds per step of each phase, and of waiting in them."""
    steps = sum(r["steps"] for r in reports)
    names = reports[0]["phases_s"]
    phases = {n: 1e3 * sum(r["phases_s"][n] for r in reports) / steps for n in names}
    waited = sum(r["wait_s"] for r in reports)
    return phases if math.isnan(waited) else {**phases, "waiting": 1e3 * waited / steps}


def spread(launches: Sequence[Mapping[str, float]]) -> Row:
    """Returns each figure's median under its name, and its ``_min`` and ``_max``."""
    row: Row = {}
    for name in SPREAD:
        values = [figures[name] for figures in launches]
        row[name] = median(values)
        row[f"{name}_min"], row[f"{name}_max"] = min(values), max(values)
    return row


def add_ratios(rows: Iterable[Row], reference: str) -> None:
    """Adds to every row that ran the ratio of its medians to those of ``reference``."""
    ran = [row for row in rows if MISSING not in row]
    base = next((row for row in ran if row["name"] == reference), None)
    for row in ran:
        row["reference"] = reference if base else None
        for name in RATIOS:
            value = row[name] / base[name] if base and base[name] else None
            row[f"ratio_{name}"] = value


def _number(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        if abs(value) >= 100:
            return f"{value:,.0f}"
        return f"{value:.4g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def format_table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Returns an aligned table; ``columns`` maps keys to headings, in order.

    Rows that could not run are said below it, with the reason.
    """
    shown = [row for row in rows if MISSING not in row]
    cells = [[_number(row.get(key)) for key in columns] for row in shown]
    widths = [
        max(map(len, column)) for column in zip(columns.values(), *cells, strict=True)
    ]
    numeric = [
        any(isinstance(row.get(key), (int, float)) for row in shown) for key in columns
    ]

    def line(texts: Iterable[str]) -> str:
        aligned: list[str] = []
        for text, width, right in zip(texts, widths, numeric, strict=True):
            pad: Callable[[int], str] = text.rjust if right else text.ljust
            aligned.append(pad(width))
        return "  ".join(aligned).rstrip()

    lines = []
    if shown:
        lines = [line(columns.values()), line("-" * w for w in widths)]
        lines += map(line, cells)
    lines += [
        f"not run: {row['name']}: {row[MISSING]}" for row in rows if MISSING in row
    ]
    return "\n".join(lines)


def json_line(row: Mapping[str, Any]) -> str:
    """Returns one line of strict JSON; what is not a number becomes null."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(item) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return json.dumps(clean(row), allow_nan=False)


def commit() -> str | None:
    """Returns the checkout's commit, or None outside a checkout or without git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
