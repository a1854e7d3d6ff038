# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What training on flights measures: speed, traffic, waiting, the curve of the AUC."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import torch_cpudist as cpudist

COUNTERS = ("bytes_sent", "bytes_received", "wait_s")


class Progress:
    """What trainer 0 measures, shows and writes down; the others keep quiet."""

    def __init__(
        self,
        options: argparse.Namespace,
        total: int,
        optimizer: cpudist.DistributedOptimizer,
    ) -> None:
        """Open the progress bar over `total` samples of all trainers."""
        self.optimizer = optimizer
        self.chief = cpudist.trainer_rank() == 0
        self.file: Path | None = options.results if self.chief else None
        self.seen = 0
        self.busy_s = 0.0
        self.losses: list[float] = []
        self.epoch_aucs: list[float] = []
        self.lines: list[dict[str, Any]] = []
        self.counted = {name: 0.0 for name in COUNTERS}
        self.resume()
        self.bar = tqdm(
            total=total,
            unit="samples",
            unit_scale=True,
            desc=f"{cpudist.trainer_count()} trainer(s)",
            disable=not self.chief,
            mininterval=0.2,
            file=sys.stdout,
        )
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def skip(self, samples: int) -> None:
        """Count samples of a run before this one."""
        self.seen = samples
        self.bar.update(samples)

    def step(self, samples: int, seconds: float, loss: float | None) -> None:
        """Count one step: samples of all trainers, time and loss of this one."""
        self.seen += samples
        self.busy_s += seconds
        if loss is not None:
            self.losses.append(loss)
        self.bar.update(samples)

    def so_far(self) -> dict[str, float]:
        """Return what servers and, under collective strategies, trainers were sent."""
        stats = self.optimizer.stats()
        found = {name: float(stats[name]) for name in COUNTERS}
        if among_trainers := stats.get("collective"):
            found["bytes_sent"] += among_trainers["sent_bytes"]
            found["wait_s"] += among_trainers["wait_s"]
        return found

    def resume(self) -> None:
        """Count traffic and waiting from here on."""
        self.began = self.so_far()

    def pause(self) -> None:
        """Stop counting: an evaluation follows, whose lookups are not training."""
        now = self.so_far()
        for name in COUNTERS:
            # Counters begin anew with servers that have come back.
            began = self.began[name] if now[name] >= self.began[name] else 0.0
            self.counted[name] += now[name] - began

    def totals(self) -> dict[str, Any]:
        """Return speed, traffic, waiting and staleness up to the last pause."""
        stats = self.optimizer.stats()
        traffic = self.counted["bytes_sent"] + self.counted["bytes_received"]
        return {
            "samples": self.seen,
            "samples_per_s": self.seen / self.busy_s,
            "bytes_per_sample": traffic / stats["samples"],
            "wait_s": self.counted["wait_s"],
            "busy_s": self.busy_s,
            "staleness": stats["staleness"],
        }

    def show(self, area: float) -> None:
        """Write one point of the curve and renew the figures behind the bar."""
        totals = self.totals()
        loss = float(np.mean(self.losses))
        self.write(samples=self.seen, seconds=self.busy_s, loss=loss, auc=area)
        self.losses.clear()
        self.bar.set_postfix_str(
            f"{totals['samples_per_s']:,.0f} samples/s, "
            f"{totals['bytes_per_sample']:,.0f} B/sample, "
            f"waited {totals['wait_s']:.1f} s, AUC {area:.4f}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a snapshot has of it: the curve so far."""
        return {
            "busy_s": self.busy_s,
            "losses": list(self.losses),
            "epoch_aucs": list(self.epoch_aucs),
            "lines": list(self.lines),
            "counted": dict(self.counted),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the curve of a snapshot; its points are written anew."""
        lines = state.pop("lines")
        self.__dict__.update(state)
        for line in lines:
            self.write(**line)

    def write(self, **line: Any) -> None:
        """Append one JSON line to the results file."""
        self.lines.append(line)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as results:
                results.write(json.dumps(line) + "\n")
