# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Dealing files to trainers, without loss or repeat."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable

from torch_cpudist.errors import InvalidArgumentError

Path = str | os.PathLike[str]


def deal(files: Iterable[Path], trainer_rank: int, trainer_count: int) -> list[Path]:
    """Returns the files of one trainer: every ``trainer_count``-th of the sorted list.

    Sorting makes the split independent of the order in which a directory was listed, so
    that the trainers' shares never overlap.

    Args:
        files: the same files on every trainer, in any order.
        trainer_rank: whose share.
        trainer_count: into how many shares.

    Raises:
        InvalidArgumentError: one path instead of a list, or a file given twice.
    """
    if isinstance(files, (str, os.PathLike)):
        raise InvalidArgumentError(
            f"split_files: expected a list of files, got one path {os.fspath(files)!r}"
        )
    ordered = sorted(files, key=os.fspath)
    for first, second in itertools.pairwise(ordered):
        if os.fspath(first) == os.fspath(second):
            raise InvalidArgumentError(
                f"split_files: {os.fspath(first)!r} is given twice; its samples would "
                "be "
                "trained twice. Remove one."
            )
    return ordered[trainer_rank::trainer_count]
