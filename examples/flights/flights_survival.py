# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A run whose servers were killed and came back: what trainers saw, and the accounts.

Each trainer writes down what it has made and what was lost with the servers. The
updates that the servers have at the end, as the export says, have to be what trainers
have made less what they report lost, to the step and to the sample.
"""

from __future__ import annotations

import json
import os
import time
from bisect import bisect_right
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch_cpudist as cpudist


@dataclass(frozen=True)
class Seen:
    """What one trainer has seen.

    Attributes:
        trainer: its rank.
        pid: of its process.
        steps: that this process has made.
        all_steps: that the run has.
        interval: steps of trainer 0 between snapshots.
        samples: behind its steps, as told to the optimizer.
        count: how often servers have come back; what follows is of the first time.
        lost_updates: of its steps, those that no server has.
        lost_samples: behind these.
        lost_s: seconds of training that went with them.
        waited_s: the step that met the loss, which is the wait for the servers.
        snapshot: that the servers came back with; `None` if none is of the step that
            the loss goes back to.
        base: of the snapshot, if it has only what has changed.
        written: steps between the snapshot's moment and its commit.
        longest: the most steps between these two of any snapshot.
    """

    trainer: int
    pid: int
    steps: int
    all_steps: int
    interval: int
    samples: int
    count: int
    lost_updates: int = 0
    lost_samples: int = 0
    lost_s: float = 0.0
    waited_s: float = 0.0
    snapshot: str | None = None
    base: str | None = None
    written: int = 0
    longest: int = 0

    @property
    def most_lost(self) -> int:
        """Updates that may be lost.

        The snapshot after the one that servers came back with is due at its interval,
        or when that one is written, and counts when it is written itself. The last one
        are the gradients of the step that has met the loss.
        """
        return max(self.interval, self.written) + self.longest + 1


class Witness:
    """Of one trainer, and told of each of its steps."""

    def __init__(
        self, optimizer: cpudist.DistributedOptimizer, directory: Path
    ) -> None:
        """Nothing was lost yet.

        Args:
            optimizer: that has resumed.
            directory: of its snapshots.
        """
        self._optimizer = optimizer
        self._directory = directory
        self._samples: list[int] = []
        self._ends: list[float] = []  # of steps, by the clock of files
        self._newest = ""
        self._longest = 0
        self._seen: dict[str, Any] = {"count": 0}

    def step(self, samples: int) -> None:
        """A step was made of so many samples of this trainer."""
        self._samples.append(samples)
        self._ends.append(time.time())
        stats = self._optimizer.stats()
        self._look_at(stats["snapshot"]["last"])
        recovered = stats["recovered"]
        if recovered["count"] == self._seen["count"]:
            return
        if self._seen["count"]:
            self._seen["count"] = recovered["count"]
            return
        kept = len(self._samples) - recovered["lost_updates"]
        self._seen = {
            **{name: recovered[name] for name in ("count", "lost_updates", "lost_s")},
            "lost_samples": sum(self._samples[kept:]),
            "waited_s": self._ends[-1] - self._ends[-2],
            **self._snapshot_of(kept),
        }

    def _look_at(self, name: str | None) -> None:
        """Notice how long the newest snapshot took to be written, if there is one."""
        if name is None or name == self._newest:
            return
        self._newest = name
        # One that others have followed may be gone again.
        with suppress(FileNotFoundError):
            path = self._directory / name / "manifest.json"
            self._longest = max(self._longest, self._written(path, self._step_of(path)))

    def _step_of(self, path: Path) -> int:
        """Return the step of this trainer that a manifest is of."""
        trainers = json.loads(path.read_text("utf-8"))["trainers"]
        steps = {one["rank"]: int(one["steps"]) for one in trainers}
        return steps[cpudist.trainer_rank()]

    def _written(self, path: Path, step: int) -> int:
        """Return how many steps were made between that one and a manifest's commit."""
        return max(0, bisect_right(self._ends, path.stat().st_mtime) - step)

    def _snapshot_of(self, step: int) -> dict[str, Any]:
        """Return which snapshot is of that step of this trainer; empty if none is."""
        for path in sorted(self._directory.glob("*/manifest.json"), reverse=True):
            if self._step_of(path) == step:
                base = json.loads(path.read_text("utf-8")).get("base")
                written = self._written(path, step)
                self._longest = max(self._longest, written)
                return {
                    "snapshot": path.parent.name,
                    "base": base and base["name"],
                    "written": written,
                }
        return {}

    def write(self, results: Path, all_steps: int, interval: int) -> None:
        """Write down what was seen, beside the results of trainer 0."""
        rank = cpudist.trainer_rank()
        seen = Seen(
            trainer=rank,
            pid=os.getpid(),
            steps=len(self._samples),
            all_steps=all_steps,
            interval=interval,
            samples=sum(self._samples),
            longest=self._longest,
            **self._seen,
        )
        path = results.with_suffix(f".trainer-{rank}.json")
        path.write_text(json.dumps(asdict(seen)), encoding="utf-8")


def read_seen(results: Path, trainers: int) -> list[Seen]:
    """Return what the trainers of a run have seen."""
    paths = [results.with_suffix(f".trainer-{rank}.json") for rank in range(trainers)]
    return [Seen(**json.loads(path.read_text("utf-8"))) for path in paths]


def on_servers(export: Path) -> tuple[int, int]:
    """Return the steps and the samples behind an exported model, as servers count."""
    version = json.loads((export / "manifest.json").read_text("utf-8"))["version"]
    return int(version["steps"]), int(version["samples"])


def told(seen: list[Seen], kept: tuple[int, int]) -> list[str]:
    """Return the lines that say what became of the run."""
    first = seen[0]
    changes = f", what has changed since {first.base}" if first.base else ""
    lines = [
        f"trainer {one.trainer}: process {one.pid} made all {one.steps:,} steps; it "
        f"waited {one.waited_s:.1f} s for servers, and lost {one.lost_updates} updates "
        f"of {one.lost_s:.1f} s; a snapshot is due every {one.interval} steps, and is "
        f"written in up to {one.longest}"
        for one in seen
    ]
    lines.append(f"servers came back with snapshot {first.snapshot}{changes}")
    steps, samples = kept
    made, lost = (
        sum(v) for v in zip(*((s.steps, s.lost_updates) for s in seen), strict=True)
    )
    of, less = (
        sum(v) for v in zip(*((s.samples, s.lost_samples) for s in seen), strict=True)
    )
    lines.append(
        f"counted: {made:,} updates made - {lost:,} lost = {made - lost:,}, the "
        f"servers have {steps:,}; of samples {of:,} - {less:,} = {of - less:,}, the "
        f"servers have {samples:,}"
    )
    return lines


def lost_too_much(seen: list[Seen]) -> list[str]:
    """Say who has lost more than an interval and what was made meanwhile."""
    return [
        f"trainer {one.trainer} lost {one.lost_updates} updates, more than "
        f"{one.most_lost}: a snapshot is due every {one.interval} steps, this one took "
        f"{one.written} to be written, and none more than {one.longest}"
        for one in seen
        if one.lost_updates > one.most_lost
    ]


def uncounted(seen: list[Seen], kept: tuple[int, int]) -> list[str]:
    """Say what does not hold of the accounts, one sentence each.

    Args:
        seen: by the trainers.
        kept: steps and samples that the servers have at the end.
    """
    found = []
    for one in seen:
        who = f"trainer {one.trainer}"
        if one.count != 1:
            found.append(f"servers came back {one.count} times for {who}, not once")
        elif one.snapshot is None:
            found.append(
                f"{who} reports {one.lost_updates} lost updates, and no snapshot is "
                "of the step that they begin with"
            )
        if one.steps != one.all_steps:
            found.append(
                f"{who} made {one.steps} of {one.all_steps} steps in one process: it "
                "was started again"
            )
    if len({one.snapshot for one in seen}) > 1:
        found.append("trainers went on from different snapshots")
    expected = (
        sum(one.steps - one.lost_updates for one in seen),
        sum(one.samples - one.lost_samples for one in seen),
    )
    if expected != kept:
        found.append(
            f"servers have {kept[0]} updates of {kept[1]} samples at the end, expected "
            f"{expected[0]} of {expected[1]}: those made less those reported lost"
        )
    return found
