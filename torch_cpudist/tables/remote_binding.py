# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The binding of a remote table: rows go from the servers to who looks them up."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from torch_cpudist import _core, ranges
from torch_cpudist.errors import ModelChangedError, RemoteTableError
from torch_cpudist.machine.device import CPU
from torch_cpudist.tables.binding import TableBinding
from torch_cpudist.tables.remote_weight import RemoteWeight, is_remote, table_of


class RemoteBinding(TableBinding):
    """One remote table of one open parameter set: no row of it is kept here.

    Thread safety: as ``TableBinding``.
    """

    remote = True

    def __init__(
        self,
        param_set: _core.ParamSet | None,
        table: int,
        name: str,
        weight: nn.Parameter,
        versions: Mapping[int, int],
        device: torch.device = CPU,
    ) -> None:
        """Binds ``weight``; see ``TableBinding``."""
        self._table = table_of(weight)
        super().__init__(param_set, table, name, weight, versions, device)
        self._table.name = name
        self._table.wrapped = True
        # Lookups ask the servers for what is not of this step: nothing gets old here.
        self._stale = False

    def bind_weight(self, param_set: _core.ParamSet) -> None:
        """Sees that the weight still has no memory of its own.

        Raises:
            ModelChangedError: it has.
        """
        if not is_remote(self.weight):
            raise self._swapped()

    def _swapped(self) -> ModelChangedError:
        return ModelChangedError(
            f"table {self.name!r}: its weight has become one with rows on this "
            "trainer, as torch.utils.swap_tensors makes it, while its optimizer "
            "trains the rows of the servers. Swap it back; or close() the "
            "DistributedOptimizer and build the optimizers anew."
        )

    def can_pull(self) -> bool:
        """Whether rows that are pulled now are those that a lookup then keeps.

        Without gradients nothing is kept, so that evaluation never grows.
        """
        here = self.param_set is not None and self.moved_to is None
        return here and torch.is_grad_enabled() and not self._written()

    def forget_rows(self, param_set: _core.ParamSet) -> None:
        """There is none."""

    @property
    def stale(self) -> bool:
        """Never: no row is kept."""
        return False

    @stale.setter
    def stale(self, stale: bool) -> None:
        """Rows of the step before are forgotten by the client."""

    def read(self, keys: torch.Tensor | None = None) -> None:
        """Refuses who wants the rows in the weight.

        Raises:
            RemoteTableError: always.
        """
        raise RemoteTableError(f"{self._table.describe()} cannot be read as a whole.")

    def look_up(
        self, ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, keep: bool
    ) -> None:
        """Brings the rows of ``ids`` to ``out``.

        Args:
            ids: int32 or int64, any shape, on the CPU or the model's device.
            weight: what the module looks up.
            out: contiguous float32 in host memory, ``[ids.numel(), dim]``.
            keep: whether their gradients may be pushed. Else they are gathered and
                forgotten: nothing grows, here or on a server.

        Raises:
            As ``pull``.
        """
        given, flat = self._opened_for(ids, weight)
        if not isinstance(self.weight, RemoteWeight):
            raise self._swapped()
        asked = 0
        if flat.numel():
            with ranges.of(ranges.PULL):
                asked = self.lasting(
                    lambda opened: opened.lookup(
                        self.table,
                        flat.data_ptr(),
                        flat.numel(),
                        flat.dtype == torch.int32,
                        out.data_ptr(),
                        keep,
                    )
                )
        if self.told is not None:
            self.told(self.table, given, asked)

    def close(self) -> None:
        """Ends the binding; the weight begins as it did before when wrapped again."""
        super().close()
        self._table.wrapped = False
