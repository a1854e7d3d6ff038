# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Feeding training: readers of files, loops over them, rows asked for ahead."""

from torch_cpudist.data.batches import Bags, batch_size
from torch_cpudist.data.generator import DataGenerator
from torch_cpudist.data.memory import InMemoryDataset
from torch_cpudist.data.prefetch import prefetch
from torch_cpudist.data.queue import QueueDataset
from torch_cpudist.data.running import DatasetRun
from torch_cpudist.data.schema import Slot, criteo_slots
from torch_cpudist.data.training import infer_from_dataset, train_from_dataset

__all__ = [
    "Bags",
    "DataGenerator",
    "DatasetRun",
    "InMemoryDataset",
    "QueueDataset",
    "Slot",
    "batch_size",
    "criteo_slots",
    "infer_from_dataset",
    "prefetch",
    "train_from_dataset",
]
