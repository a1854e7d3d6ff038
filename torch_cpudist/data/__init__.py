# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Feeding training: batches, loops over datasets, rows that are asked for ahead."""

from torch_cpudist.data.batches import Bags, batch_size
from torch_cpudist.data.generator import DataGenerator
from torch_cpudist.data.prefetch import prefetch
from torch_cpudist.data.running import DatasetRun
from torch_cpudist.data.training import infer_from_dataset, train_from_dataset

__all__ = [
    "Bags",
    "DataGenerator",
    "DatasetRun",
    "batch_size",
    "infer_from_dataset",
    "prefetch",
    "train_from_dataset",
]
