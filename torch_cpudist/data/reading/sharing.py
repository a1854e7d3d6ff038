# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which share of the data this process reads: of its trainer, and of its worker."""

from __future__ import annotations

from collections.abc import Iterable

from torch.utils.data import get_worker_info

from torch_cpudist.errors import ConfigurationError, InvalidArgumentError
from torch_cpudist.launch import context
from torch_cpudist.machine.files import Dealt

Share = tuple[int, int]


def own_share(files: Iterable[object], given: Share | None) -> Share:
    """The share of this trainer: (which, of how many).

    Args:
        files: as given to the dataset; what ``split_files`` returned is read whole.
        given: ``share=`` of the dataset, which wins.

    Raises:
        InvalidArgumentError: ``given`` is no such pair.
        ConfigurationError: several trainers were launched, and none knows its number.
    """
    if given is not None:
        pair = tuple(given) if isinstance(given, (tuple, list)) else ()
        whole = len(pair) == 2 and all(type(number) is int for number in pair)
        if not whole or not 0 <= pair[0] < pair[1]:
            raise InvalidArgumentError(
                f"share={given!r}, expected (number, count) with 0 <= number < count"
            )
        return pair[0], pair[1]
    if isinstance(files, Dealt):
        return 0, 1
    here = context.last()
    if here is not None:
        if here.role != "trainer":
            raise ConfigurationError(
                "a dataset on a dedicated server: only trainers read data."
            )
        return here.trainer_rank, here.trainer_count
    if context.launched_ranks() > 1:
        raise ConfigurationError(
            "several ranks were launched, and this one does not know which trainer it "
            "is: call cpudist.init() before the dataset is made, or pass "
            "share=(number, count)."
        )
    return 0, 1


def trainers_share(files: Iterable[object], given: Share | None) -> Share:
    """Whose records a global shuffle gives away: as ``own_share``, for shuffles.

    What ``split_files`` returned is read whole and still is one share of many.
    """
    here = context.last()
    if given is None and isinstance(files, Dealt) and here is not None:
        return here.trainer_rank, here.trainer_count
    return own_share(files, given)


def share_of_worker(share: Share) -> Share:
    """The part of a share that this process of a ``DataLoader`` reads."""
    worker = get_worker_info()
    if worker is None:
        return share
    number, count = share
    return number * worker.num_workers + worker.id, count * worker.num_workers
