# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws the rows of the case ``cnn`` and prints them as a table for the docs.

python benchmarks/run.py cnn --json build/cnn.jsonl
python benchmarks/plot_cnn.py build/cnn.jsonl docs/images/cnn.png

Needs matplotlib: ``pip install -e .[plot]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import MISSING

Row = dict[str, Any]
# So that a difference of rounding does not look like one of quality.
ACCURACY_SHOWN = 0.02
HEADINGS = (
    *("row", "processes x replicas x threads", "s per epoch (min to max)", "speedup"),
    *("CPU s per epoch", "test accuracy"),
)


def read_rows(path: Path) -> tuple[list[Row], list[Row]]:
    """Returns the rows that ran, and those that could not.

    Raises:
        SystemExit: there are no rows of ``cnn`` that ran.
    """
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    rows = [row for row in rows if row.get("case") == "cnn"]
    ran = [row for row in rows if MISSING not in row]
    if not ran:
        raise SystemExit(f"{path}: expected rows of `run.py cnn --json`, found none")
    return ran, [row for row in rows if MISSING in row]


def table(ran: Sequence[Row], absent: Sequence[Row]) -> str:
    """Returns a Markdown table; what could not run is said below it."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    for row in ran:
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
        least, most = row["epoch_s_min"], row["epoch_s_max"]
        seconds = f"{row['epoch_s']:.1f} ({least:.1f} to {most:.1f})"
        cells = (
            row["name"],
            f"{row['trainers']} x {row['replicas']} x {row['threads']}",
            seconds,
            speedup,
            f"{row['cpu_s']:.1f}",
            f"{row['accuracy']:.4f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nNot run: {row['name']}: {row[MISSING]}" for row in absent]
    return "\n".join(lines)


def draw_accuracy(rows: Sequence[Row], axis: Any) -> None:
    """Draws test accuracy by epoch; after a single one, beside the bars of the rows."""
    if max(len(row["accuracy_by_epoch"]) for row in rows) == 1:
        found = [row["accuracy_by_epoch"][0] for row in rows]
        axis.plot(found, [row["name"] for row in rows], "o")
        axis.invert_yaxis()
        middle = (min(found) + max(found)) / 2
        axis.set(xlabel="test accuracy after one epoch")
        axis.set_xlim(middle - ACCURACY_SHOWN / 2, middle + ACCURACY_SHOWN / 2)
        return
    for row in rows:
        by_epoch = row["accuracy_by_epoch"]
        axis.plot(range(1, len(by_epoch) + 1), by_epoch, "o-", label=row["name"])
    axis.set(xlabel="epoch", ylabel="test accuracy")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize="small")


def draw(rows: Sequence[Row], picture: Path) -> None:
    """Draws seconds per epoch and test accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    names = [row["name"] for row in rows]
    seconds = [row["epoch_s"] for row in rows]
    spread = [
        [row["epoch_s"] - row["epoch_s_min"] for row in rows],
        [row["epoch_s_max"] - row["epoch_s"] for row in rows],
    ]
    left.barh(names, seconds, xerr=spread, color="tab:blue", ecolor="0.3", capsize=3)
    left.invert_yaxis()
    left.set(xlabel="seconds per epoch (median, min to max)")
    draw_accuracy(rows, right)
    facts = rows[0].get("machine", {})
    figure.suptitle(
        f"Fashion-MNIST, batch {rows[0]['batch']} in all, {rows[0]['precision']}, "
        f"{facts.get('cores', '?')} cores",
        fontsize="medium",
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=90)
    plt.close(figure)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="file that run.py cnn --json wrote")
    parser.add_argument("picture", type=Path, help="PNG to write")
    options = parser.parse_args(arguments)
    ran, absent = read_rows(options.rows)
    draw(ran, options.picture)
    print(table(ran, absent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
