# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Dealing files to trainers, without loss or repeat."""

from __future__ import annotations

import os
from collections.abc import Iterable

from torch_cpudist.errors import InvalidArgumentError

Path = str | os.PathLike[str]


class Dealt(list[Path]):
    """Files that were dealt: a trainer's share, which no one deals again."""


def deal(files: Iterable[Path], trainer_rank: int, trainer_count: int) -> Dealt:
    """Returns the files of one trainer: a run of the list, in its order.

    Of ``n`` files every trainer gets ``n // trainer_count``, the first
    ``n % trainer_count`` trainers one more: ``a b c d e`` over two are ``a b c`` and
    ``d e``. With more trainers than files the last ones get none.

    Args:
        files: the same files in the same order on every trainer.
        trainer_rank: whose share.
        trainer_count: into how many shares.

    Raises:
        InvalidArgumentError: one path instead of a list, a set, whose order differs
            from process to process, or a file given twice.
    """
    if isinstance(files, (str, os.PathLike)):
        raise InvalidArgumentError(
            f"split_files: expected a list of files, got one path {os.fspath(files)!r}"
        )
    if isinstance(files, (set, frozenset)):
        raise InvalidArgumentError(
            "split_files: expected a list of files, got a set, whose order is another "
            "one in every process. Pass sorted(files)."
        )
    listed = list(files)
    seen: set[str] = set()
    for path in listed:
        name = os.fspath(path)
        if name in seen:
            raise InvalidArgumentError(
                f"split_files: {name!r} is given twice; its samples would be trained "
                "twice. Remove one."
            )
        seen.add(name)
    size, larger = divmod(len(listed), trainer_count)
    begin = trainer_rank * size + min(trainer_rank, larger)
    return Dealt(listed[begin : begin + size + (trainer_rank < larger)])
