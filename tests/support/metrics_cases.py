# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What tests of metrics measure, in this process and in several."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist import metrics

Array = NDArray[np.float64]


def collection(
    auc: Mapping[str, Any] | None = None, from_logits: bool = False
) -> metrics.Metrics:
    """One of each; ``auc``: options of its own."""
    options: dict[str, Any] = {"from_logits": from_logits}
    return metrics.Metrics(
        {
            "auc": metrics.AUC(**options, **(auc or {})),
            "loss": metrics.LogLoss(**options),
            "calibration": metrics.Calibration(**options),
            "mae": metrics.MAE(**options),
            "mse": metrics.MSE(**options),
            "rmse": metrics.RMSE(**options),
            "accuracy": metrics.Accuracy(**options),
        }
    )


def samples(n: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Probabilities, labels that they explain, and weights."""
    rng = np.random.default_rng(seed)
    p = rng.beta(0.5, 2.0, n)
    return p, (rng.uniform(size=n) < p).astype(np.float64), rng.uniform(size=n)


def ranked() -> metrics.Metrics:
    """One of each that has groups, and what else came with them."""
    return metrics.Metrics(
        {
            "auc": metrics.AUC(),
            "gauc": metrics.GAUC(),
            "ndcg": metrics.NDCG(5),
            "recall": metrics.Recall(5),
            "entropy": metrics.NormalizedEntropy(),
        }
    )


def grouped_part(
    rank: int, users: int = 60, most: int = 20
) -> tuple[Array, Array, NDArray[np.int64]]:
    """A trainer's samples of users whom others have, too: up to ``most`` of each."""
    rng = np.random.default_rng(rank)
    groups = np.repeat(np.arange(users), rng.integers(1, most + 1, users)) * 7 - 50
    rng.shuffle(groups)
    p = rng.uniform(0.001, 0.999, len(groups))
    y = rng.uniform(size=len(p)) < 0.1 + 0.4 * p
    return p, y.astype(np.float64), groups


def part_of(rank: int) -> tuple[Array, Array]:
    """A trainer's samples, of a number of its own."""
    p, y, _ = samples(3000 + 500 * rank, seed=rank)
    return p, y


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a collection as JSON has them."""
    report = dataclasses.asdict(values["calibration"])
    return {**values, "calibration": report}


def over_trainers(context: cpudist.Context, report: Any) -> None:
    """What all trainers find together; then one does not come any more."""
    rank = context.trainer_rank
    few = {"buckets": 1 << 10}
    own = collection(few)
    found: dict[str, Any] = {"none": str(own.compute_all()["auc"])}
    if rank != 1:  # which has no samples
        own.update(*part_of(rank))
    found["all"] = flat(own.compute_all())
    found["again"] = flat(own.compute_all())
    found["own"] = None if rank == 1 else flat(own.compute())

    within = ranked()
    p, y, groups = grouped_part(rank)
    within.update(p, y, groups=groups)
    found["ranked"] = within.compute_all()

    other = metrics.AUC(buckets=64 if rank == 2 else 128)
    with pytest.raises(cpudist.ConfigMismatchError) as caught:
        other.compute_all()
    found["mismatch"] = str(caught.value)
    found["thread"] = _in_a_thread(own.compute_all)

    p, y = part_of(rank)
    batches = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in [(p, y)]]
    run = cpudist.train_from_dataset(
        lambda batch: {"predictions": batch[0], "labels": batch[1]},
        batches,
        metrics=metrics.MSE(),
        all_trainers=True,
        log=lambda line: found.update(line=line),
        print_every=1,
    )
    found["run"] = run.metrics["MSE"]
    report(found)
    if rank == 2:
        threading.Event().wait(PATIENCE_S)
    own.compute_all()


def _in_a_thread(call: Any) -> str:
    """The error of a thread that has no context."""
    said: list[str] = []

    def work() -> None:
        try:
            call()
        except cpudist.Error as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    return said[0]
