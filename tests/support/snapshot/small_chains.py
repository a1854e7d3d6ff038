# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A small chain: all rows, and twice what has changed, gone and come back since."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from small_snapshots import commit, row_values

from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.manifest import Manifest

NAMES = (
    "snap-000000000012-5f3a",
    "snap-000000000013-5f3a",
    "snap-000000000014-5f3a",
)
# Rows of each member, and keys that have gone since the one before.
ROWS = ((*range(0, 40, 3), 2**39), (3, 6, 100), (6, 9, 101))
GONE = ((), (9, 12, 36), (100, 15, 7))
TABLE = "users.weight"
# By key, which member its row is of.
NEWEST: Mapping[int, int] = {
    **{key: 0 for key in ROWS[0] if key not in (9, 12, 15, 36)},
    **{3: 1, 6: 2, 9: 2, 101: 2},
}


def weights_of(keys: np.ndarray) -> np.ndarray:
    """What the chain has of rows that are in it."""
    members = np.array([NEWEST[int(key)] for key in keys], np.float32)
    return row_values(keys, 4, 0.5) + members[:, None] * 1000


def write_chain(directory: Directory, length: int = 3, **how: object) -> list[Manifest]:
    """Commits the members that are not there yet, the oldest first."""
    made: list[Manifest] = []
    for number in range(length):
        if NAMES[number] in directory.names():
            made.append(directory.manifest(NAMES[number]))
            continue
        made.append(commit_member(directory, number, made[-1] if made else None, **how))
    return made


def commit_member(
    directory: Directory, number: int, base: Manifest | None, **how: object
) -> Manifest:
    """Commits one member."""
    given = {
        "number": 12 + number,
        "tables": {TABLE: ROWS[number]},
        "gone": {TABLE: GONE[number]},
        "more": 1000.0 * number,
        "base": base,
        **how,
    }
    return commit(directory, NAMES[number], **given)
