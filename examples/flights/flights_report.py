# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compares two runs of flights.py: a picture, one line, and whether they agree.

Exits 1 when the distributed run learned too little or not what one process learned, and
with --killed when it began anew where it should have gone on from a snapshot.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

# DeepFM reaches .713 after one epoch of the day split, logistic regression .702.
LOWEST_AUC = 0.705
# Runs of one process that differ by seed alone span 0.0042, and this one is at their
# upper end (docs/convergence.md): another order of updates is one more draw.
LARGEST_GAP = 0.007
# Sync makes the updates of one process, up to rounding, which bfloat16 feels.
LARGEST_GAP_SYNC = 0.003


@dataclass(frozen=True)
class Run:
    """One results file: points of the curve, and the totals of its last line."""

    points: list[dict[str, float]]
    totals: dict[str, Any]

    @property
    def name(self) -> str:
        """What the run is called in the picture and in the line."""
        trainers, servers = self.totals["trainers"], self.totals["servers"]
        if trainers == 1 and servers == 1 and not self.remote:
            return "one process"
        remote = ", remote tables" if self.remote else ""
        return (
            f"{self.totals['strategy']}, {trainers} trainers on {servers} server(s)"
            f"{remote}"
        )

    @property
    def remote(self) -> bool:
        """Whether the tables were on the servers only."""
        return bool(self.totals.get("remote", False))

    @property
    def auc(self) -> float:
        """Test AUC after the last epoch."""
        return float(self.totals["epoch_aucs"][-1])


def read_run(path: Path) -> Run:
    """Read one results file.

    Raises:
        SystemExit: the run did not finish.
    """
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    if not lines or "epoch_aucs" not in lines[-1]:
        raise SystemExit(f"{path} has no totals: that run did not finish")
    return Run(lines[:-1], lines[-1])


def draw(runs: list[Run], picture: Path) -> None:
    """Draw training loss and test AUC over the samples seen."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for run, style in zip(runs, ("o-", "x--"), strict=True):
        samples = [point["samples"] for point in run.points]
        for axis, value in zip(axes, ("loss", "auc"), strict=True):
            axis.plot(samples, [p[value] for p in run.points], style, label=run.name)
    axes[0].set(xlabel="samples", ylabel="training loss (log loss)")
    axes[1].set(xlabel="samples", ylabel="test AUC (days after the 24th)")
    axes[1].legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def problems(distributed: Run, single: Run) -> list[str]:
    """Say what is wrong with the results, one sentence each."""
    found = []
    first = float(distributed.totals["epoch_aucs"][0])
    if distributed.totals["whole"] and first < LOWEST_AUC:
        found.append(f"test AUC after one epoch is {first:.4f}, below {LOWEST_AUC}")
    gap = abs(distributed.auc - single.auc)
    # Sync is equal at any size, where the first values of rows are; others only once
    # they have learned.
    equal = distributed.totals["strategy"] == "sync"
    equal = equal and distributed.remote == single.remote
    judged = distributed.totals["whole"] or equal
    limit = LARGEST_GAP_SYNC if equal else LARGEST_GAP
    if judged and gap > limit:
        found.append(f"test AUC differs from one process by {gap:.4f} > {limit}")
    return found


def resumed(run: Run) -> str:
    """Say what the run went on from."""
    started = run.totals.get("started") or {"name": None, "step": 0}
    return f"went on from snapshot {started['name']} at step {started['step']:,}"


def began_anew(run: Run) -> str | None:
    """Say that a run whose process was killed did not resume; `None` if it did."""
    started = run.totals.get("started")
    if started and started["name"] and started["step"] > 0:
        return None
    return (
        "a process was killed, and the run began anew: expected that it goes on from a "
        f"snapshot at a step above 0, it {resumed(run)}"
    )


def staleness(run: Run) -> str | None:
    """Say how late gradients were; `None` where no update overtakes another."""
    found = run.totals["staleness"]
    if not found["pushes"]:
        return None
    return (
        f"staleness of trainer 0's {found['pushes']:,} gradients: "
        f"{found['steps_mean']:.2f} steps on average, {found['steps_max']} at most"
    )


def compare(distributed: Run, single: Run) -> str:
    """Return the line that ends the demo."""

    def words(run: Run) -> str:
        totals = run.totals
        return (
            f"{run.name}: AUC {run.auc:.4f}, {totals['samples_per_s']:,.0f} samples/s, "
            f"{totals['bytes_per_sample']:,.0f} B/sample, "
            f"waited {totals['wait_s']:.1f} of {totals['busy_s']:.1f} s"
        )

    ratio = distributed.totals["samples_per_s"] / single.totals["samples_per_s"]
    gap = distributed.auc - single.auc
    return (
        f"{words(distributed)} | {words(single)} | "
        f"AUC {gap:+.4f}, samples/s x {ratio:.2f}"
    )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("distributed", type=Path, help="results of the first run")
    parser.add_argument("single", type=Path, help="results of one process")
    parser.add_argument("--picture", type=Path, required=True, help="PNG to write")
    parser.add_argument(
        "--killed", action="store_true", help="the first run has to have resumed"
    )
    options = parser.parse_args()
    distributed, single = read_run(options.distributed), read_run(options.single)
    draw([distributed, single], options.picture)
    print(f"picture: {options.picture}")
    if line := staleness(distributed):
        print(line)
    wrong = problems(distributed, single)
    if options.killed:
        print(resumed(distributed))
        if sentence := began_anew(distributed):
            wrong.append(sentence)
    for sentence in wrong:
        print(f"demo: {sentence}", file=sys.stderr)
    print(compare(distributed, single))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
