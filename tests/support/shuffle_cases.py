# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a trainer does in tests of the global shuffle."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from data_cases import SLOTS, flat, read
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.data import InMemoryDataset


def shuffled(context: cpudist.Context, report: Any) -> None:
    """Shuffles globally in several ways, then waits for a trainer that is killed."""
    files = os.environ["SHUFFLE_FILES"].split(os.pathsep)
    rank = context.trainer_rank
    found: dict[str, Any] = {}

    def loaded() -> InMemoryDataset:
        dataset = InMemoryDataset(files, SLOTS, batch_size=32, threads=rank + 1)
        dataset.load()
        return dataset

    def numbers(dataset: InMemoryDataset) -> list[int]:
        return [record[0] for record in flat(read(dataset))]

    dataset = loaded()
    found["before"] = numbers(dataset)
    under_way = iter(dataset)
    next(under_way)
    dataset.global_shuffle(seed=4)  # also in the middle of an epoch
    with pytest.raises(cpudist.ClosedError, match="shuffle"):
        next(under_way)
    found["once"] = numbers(dataset)
    state = dataset.state_dict()
    dataset.global_shuffle(seed=5, key="bag")
    found["by_key"] = [(r[0], *r[1][:1]) for r in flat(read(dataset))]
    again = loaded()
    again.load_state_dict(state)
    found["again"] = numbers(again)
    with pytest.raises(cpudist.ConfigMismatchError, match=r"trainers \[1, 2\]"):
        again.global_shuffle(seed=min(rank, 1))
    with pytest.raises(cpudist.ClosedError):
        len(again)  # records of a shuffle that failed are gone
    whole = InMemoryDataset(files, SLOTS, share=(0, 1))
    whole.load()
    found["all"] = whole.records
    with pytest.raises(cpudist.ConfigurationError, match="share"):
        whole.global_shuffle()  # everybody has everything: nothing to deal
    dealt = InMemoryDataset(cpudist.split_files(files), SLOTS, batch_size=32)
    dealt.load()
    found["dealt_before"] = numbers(dealt)
    dealt.global_shuffle(seed=4)
    found["dealt"] = numbers(dealt)
    report(found)
    if rank == 2:
        threading.Event().wait(PATIENCE_S)
    dataset.global_shuffle(seed=6)
