# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Metrics of a stream of batches, of one trainer or summed over all of them.

``update(predictions, labels)`` after every batch, from any thread (``groups=`` where
the order within groups counts); ``compute()`` for what this trainer has seen,
``compute_all()`` for what all trainers have. See docs/metrics.md.
"""

from torch_cpudist.metrics.auc import AUC
from torch_cpudist.metrics.base import Metric
from torch_cpudist.metrics.calibration import Calibration, CalibrationReport
from torch_cpudist.metrics.collection import Metrics
from torch_cpudist.metrics.entropy import NormalizedEntropy
from torch_cpudist.metrics.means import MAE, MSE, RMSE, Accuracy, LogLoss
from torch_cpudist.metrics.ranking import GAUC, NDCG, Recall

__all__ = [
    "AUC",
    "GAUC",
    "MAE",
    "MSE",
    "NDCG",
    "RMSE",
    "Accuracy",
    "Calibration",
    "CalibrationReport",
    "LogLoss",
    "Metric",
    "Metrics",
    "NormalizedEntropy",
    "Recall",
]
