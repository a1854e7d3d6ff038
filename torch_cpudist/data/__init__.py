# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Feeding training: readers of files, loops over them, rows asked for ahead."""

from torch_cpudist.data.reading.generator import DataGenerator
from torch_cpudist.data.reading.memory import InMemoryDataset
from torch_cpudist.data.reading.queue import QueueDataset
from torch_cpudist.data.reading.remote import list_files
from torch_cpudist.data.reading.schema import Slot, criteo_slots
from torch_cpudist.data.training.datasets import infer_from_dataset, train_from_dataset
from torch_cpudist.data.training.loop import DatasetRun
from torch_cpudist.data.training.prefetch import prefetch
from torch_cpudist.model.bags import Bags, batch_size

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
    "list_files",
    "prefetch",
    "train_from_dataset",
]
