# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Declaring the rows of batches to come: ``DistributedOptimizer.prefetch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.log import logger
from torch_cpudist.resuming.own_state import ReadsAhead
from torch_cpudist.tables.binding import check_rows

if TYPE_CHECKING:
    from torch_cpudist.served.base import Trained
    from torch_cpudist.served.set import ParameterSet

# Batches that may be outstanding; Prefetcher::kMostBatches of the core.
MOST_BATCHES = 16


def check_ids(ids: Mapping[nn.Module, torch.Tensor]) -> None:
    """Checks the form of what ``prefetch`` is given.

    Raises:
        InvalidArgumentError: it is no mapping of modules to tensors.
    """
    if not isinstance(ids, Mapping):
        raise InvalidArgumentError(
            f"prefetch: expected a mapping of modules to ids, found "
            f"{type(ids).__name__}. Pass {{model.table: ids}}."
        )
    for module, tensor in ids.items():
        if isinstance(module, nn.Module) and isinstance(tensor, torch.Tensor):
            continue
        raise InvalidArgumentError(
            "prefetch: expected modules as keys and tensors as values, found "
            f"{type(module).__name__}: {type(tensor).__name__}."
        )


class Prefetching:
    """The batches to come of one optimizer; not after its end.

    Thread safety: as ``DistributedOptimizer.step``.

    Attributes:
        readers: what reads a dataset ahead now.
    """

    def __init__(self, trained: Trained, pulled: ParameterSet | None) -> None:
        """Nothing is asked for yet.

        Args:
            trained: what the optimizer trains.
            pulled: what of it has rows that a lookup brings in; ``None``: all are here.
        """
        self._trained = trained
        self._pulled = pulled
        self._told = False
        self.readers: list[ReadsAhead] = []

    def follow(self, reader: ReadsAhead) -> None:
        """Takes what it reads ahead out of positions in data that are saved."""
        if all(reader is not one for one in self.readers):
            self.readers.append(reader)

    def leave(self, reader: ReadsAhead) -> None:
        """It reads no more."""
        self.readers[:] = [one for one in self.readers if one is not reader]

    def ask(self, ids: Mapping[nn.Module, torch.Tensor], *, managed: bool) -> int:
        """Asks for the rows of a batch; see ``DistributedOptimizer.prefetch``.

        Args:
            ids: by the module that looks them up.
            managed: the caller tells by ``use`` what is computed when.

        Returns:
            The number of the batch; 0 if there was nothing to ask for.
        """
        check_ids(ids)
        if self._pulled is not None:
            return self._pulled.prefetch(ids, managed)
        check_rows([table.found for table in self._trained.placement.tables], ids)
        if not self._told:
            self._told = True
            logger.info("prefetch: every row is here already, there is nothing to do")
        return 0

    def use(self, number: int) -> None:
        """The batch of this number is computed next: it ends with the next step."""
        if number and self._pulled is not None:
            self._pulled.opened.use_prefetched(number)

    def forget(self) -> None:
        """Drops what is outstanding."""
        if self._pulled is not None:
            self._pulled.opened.drop_prefetched()
