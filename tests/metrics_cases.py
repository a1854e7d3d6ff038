# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What tests of metrics measure, in this process and in several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def part_of(rank: int) -> tuple[Array, Array]:
    """A trainer's samples, of a number of its own."""
    p, y, _ = samples(3000 + 500 * rank, seed=rank)
    return p, y
