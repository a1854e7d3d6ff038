# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Declaring the rows of batches to come: ``DistributedOptimizer.prefetch``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.log import logger
from torch_cpudist.tables.binding import check_rows

if TYPE_CHECKING:
    from torch_cpudist.drivers.base import Driver
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
    """What a ``DistributedOptimizer`` has for batches to come."""

    _driver: Driver
    _parameters: Trained | None
    _told_prefetch = False

    @abstractmethod
    def _open(self) -> Trained:
        """What is trained; raises ``ClosedError`` after ``close()``."""

    def _pulled(self) -> ParameterSet | None:
        self._open()
        return self._driver.pulled

    def prefetch(self, ids: Mapping[nn.Module, torch.Tensor]) -> None:
        """Asks for the rows of a batch to come, and returns at once.

        Call it once per batch, with all tables, before the forward of an earlier batch
        (``cpudist.data.prefetch`` does). Rows that are here or on their way are not
        asked for again; the forward waits for what has not come. Sync and HalfAsync:
        rows that a round updates meanwhile come anew with its reply, so that results
        are those without prefetch, bit for bit under Sync. Async: rows are as old as
        they are, which ``opt.stats()["staleness"]`` counts. Geo, AllReduce and Reduce:
        nothing to do, all rows are here; what is passed is checked all the same.

        A hint: a lookup of other ids pulls them; a batch whose ids are never used goes
        when 16 newer ones were declared. A batch counts as used in the step that has
        looked up all its ids. ``flush()``, ``leave()``, ``barrier()`` and everything
        that writes to the servers forget what is outstanding; while this trainer takes
        no part (after ``leave()``) the call does nothing.

        Cost: one request and reply per server that owns rows that are missing; in
        rounds 8 bytes per row held, and the updated ones again, in the push and its
        reply. Thread safety: as ``step``.

        Args:
            ids: int32 or int64, any shape, on the CPU, by the module that looks them
                up.

        Raises:
            InvalidArgumentError: no mapping, or a module that is no table; with
                ``max_staleness``, which prefetched rows would exceed.
            IdTypeError, UnsupportedModelError: ids of another dtype or device.
            RowOutOfRangeError: an id is no row; nothing was asked for.
            ModelChangedError: the table was written by others.
            PeerLostError: a server is lost.
        """
        self._ask(ids, managed=False)

    def prefetch_managed(self, ids: Mapping[nn.Module, torch.Tensor]) -> int:
        """``prefetch`` for a caller who tells by ``use_prefetched`` what is used when.

        Returns:
            The number of the batch; 0 if there was nothing to ask for.
        """
        return self._ask(ids, managed=True)

    def _ask(self, ids: Mapping[nn.Module, torch.Tensor], managed: bool) -> int:
        check_ids(ids)
        parameters = self._pulled()
        if parameters is not None:
            return parameters.prefetch(ids, managed)
        check_rows([table.found for table in self._open().placement.tables], ids)
        if not self._told_prefetch:
            self._told_prefetch = True
            logger.info("prefetch: every row is here already, there is nothing to do")
        return 0

    def use_prefetched(self, number: int) -> None:
        """The batch of this number is computed next: it ends with the next step."""
        parameters = self._pulled()
        if number and parameters is not None:
            parameters.client.use_prefetched(parameters.id, number)

    def forget_prefetched(self) -> None:
        """Drops what is outstanding; nothing after ``close()``."""
        parameters = None if self._parameters is None else self._driver.pulled
        if parameters is not None:
            parameters.client.drop_prefetched(parameters.id)
