# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files of records that are known, and what datasets must make of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_cpudist.data import Slot

# A record: its number, a bag of ids, two numbers.
Record = tuple[int, tuple[int, ...], tuple[float, float]]
SLOTS = [Slot("number", dim=1), Slot("bag"), Slot("pair", "dense", dim=2)]


def records(count: int, seed: int = 0) -> list[Record]:
    """Records numbered from 0, some with empty bags, zeros among the values."""
    drawn = random.Random(seed)
    return [
        (
            number,
            tuple(
                drawn.choice([0, -1, number, 2**62])
                for _ in range(drawn.choice([0, 1, 3]))
            ),
            (drawn.choice([0.0, -0.5]), float(number)),
        )
        for number in range(count)
    ]


def line(record: Record) -> str:
    """The record as a MultiSlot line."""
    number, bag, pair = record
    ids = " ".join(map(str, (len(bag), *bag)))
    return f"1 {number} {ids} 2 {pair[0]} {pair[1]}\n"


def write(folder: Path, parts: Iterable[list[Record]]) -> list[Path]:
    """Writes a file per list of records."""
    paths = []
    for part, found in enumerate(parts):
        path = folder / f"part-{part}.txt"
        path.write_text("".join(map(line, found)))
        paths.append(path)
    return paths


def unpacked(batch: dict[str, Any]) -> list[Record]:
    """The records of a batch."""
    values, offsets = batch["bag"]
    begins = offsets.tolist()
    return [
        (number, tuple(values[begin:end].tolist()), (pair[0], pair[1]))
        for number, begin, end, pair in zip(
            batch["number"].ids.tolist(),
            begins[:-1],
            begins[1:],
            batch["pair"].tolist(),
            strict=True,
        )
    ]


def read(dataset: Iterable[dict[str, Any]]) -> list[list[Record]]:
    """The records of all batches of an epoch."""
    return [unpacked(batch) for batch in dataset]


def flat(batches: Iterable[list[Record]]) -> list[Record]:
    """Records of several batches in one list."""
    return [record for batch in batches for record in batch]
