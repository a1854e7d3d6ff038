# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two trainers in jobs of their own: servers count one as lost, and it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train_groups import Training

import torch_cpudist as cpudist


def goes_on(
    folder: Path,
    strategy: str | cpudist.Strategy,
    context: cpudist.Context,
    report: Any,
) -> dict[str, Any]:
    """Trains until it was counted as lost and is back, and some steps more."""
    training = Training(folder, "victim", strategy)
    optimizer = training.optimizer
    if context.environment.snapshot_dir:
        optimizer.resume()
        for _ in range(5):
            training.step(flush=False)
        optimizer.save_snapshot("before")
    while not optimizer.stats()["recovered"]["rejoined"]:
        training.step(flush=False)
    back = training.done()
    began = training.weights()
    for _ in range(20):
        training.step(flush=False)
    if context.environment.snapshot_dir:
        optimizer.save_snapshot("after")
    optimizer.leave()
    optimizer.flush()
    return {
        "rank": context.trainer_rank,
        "incarnation": context.incarnation,
        "steps": training.done(),
        "back": back,
        "began": began,
        "values": training.weights(),
        "recovered": optimizer.stats()["recovered"],
    }


def stays(
    folder: Path,
    strategy: str | cpudist.Strategy,
    context: cpudist.Context,
    report: Any,
) -> list[Any]:
    """Trains; tells values when the other one is lost, and trains on until the end."""
    training = Training(folder, "steady", strategy)
    if context.environment.snapshot_dir:
        training.optimizer.resume()
    while not (folder / "away").exists():
        training.step(flush=False)
    context.barrier()  # ends when no server waits for the other one any more
    training.optimizer.flush()
    report(training.weights())
    while not (folder / "stop").exists():
        training.step(flush=False)
    training.optimizer.leave()
    training.optimizer.flush()
    return [context.trainer_rank, training.done(), training.weights()]


def by_rank(
    folder: Path,
    strategy: str | cpudist.Strategy,
    context: cpudist.Context,
    report: Any,
) -> Any:
    """Trainer 0 is the one that is lost and comes back; each tells who it is."""
    report(context.trainer_rank)
    body = goes_on if context.trainer_rank == 0 else stays
    return body(folder, strategy, context, report)
