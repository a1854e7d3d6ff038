# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What trainers do to merge the records of an instance, in processes of their own."""

from __future__ import annotations

import os

import torch

import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset, Slot

SLOTS = [Slot("bag"), Slot("one", dim=1), Slot("label", "dense")]


def write(path, lines):
    """Of (instance, bag, one, label)."""
    path.write_text(
        "".join(
            f"1 {name} {' '.join(map(str, (len(bag), *bag)))} 1 {one} 1 {label}\n"
            for name, bag, one, label in lines
        )
    )
    return path


def loaded(files, **options):
    options = {"threads": 1, "batch_size": 4, **options}
    dataset = InMemoryDataset(files, SLOTS, instance_ids=True, **options)
    dataset.load()
    return dataset


def read(dataset):
    """(bag, one, label) of all records."""
    found = []
    for batch in dataset:
        values, offsets = batch["bag"]
        bags = [bag.tolist() for bag in torch.tensor_split(values, offsets[1:-1])]
        labels = batch["label"].flatten().tolist()
        found += zip(bags, batch["one"].ids.tolist(), labels, strict=True)
    return found


def merged(context, report):
    """Shuffles and merges; what was refused before, what was left out, what is."""
    dataset = loaded(os.environ["MERGED_FILES"].split(os.pathsep))
    refused = []
    for shuffle in (lambda: None, lambda: dataset.global_shuffle(seed=5)):
        shuffle()
        try:
            dataset.merge_by_id()
        except cpudist.InvalidArgumentError as error:
            refused.append(str(error))
    dataset.global_shuffle(seed=5, key="instance_id")
    left_out = dataset.merge_by_id(size=3)
    dataset.local_shuffle(seed=2)
    return [refused, left_out, read(dataset)]
