# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The binding of a remote table whose rows are in files of an export."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from torch_cpudist import _core, ranges
from torch_cpudist.tables.remote_binding import RemoteBinding
from torch_cpudist.tables.remote_weight import RemoteWeight
from torch_cpudist.tables.weight import as_it_stands


class ExportedBinding(RemoteBinding):
    """One remote table of a model that is loaded for inference.

    Thread safety: lookups from any number of threads, side by side; ``rows`` is
    replaced while none is under way.

    Attributes:
        rows: where lookups find them.
    """

    def __init__(
        self, rows: _core.ExportedTable, name: str, weight: RemoteWeight
    ) -> None:
        """Binds ``weight``, a remote one, to rows of its shape."""
        with as_it_stands():
            version = weight._version
        super().__init__(
            None, 0, name, cast(nn.Parameter, weight), {id(weight): version}
        )
        self._table.exported = True
        self.rows = rows

    def look_up(
        self, ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, keep: bool
    ) -> None:
        """Brings the rows of ``ids`` to ``out``; nothing is kept. See the base."""
        _, flat = self._checked(ids, weight)
        if flat.numel():
            with ranges.of(ranges.PULL):
                self.rows.lookup(
                    flat.data_ptr(),
                    flat.numel(),
                    flat.dtype == torch.int32,
                    out.data_ptr(),
                )

    def close(self) -> None:
        """Ends the binding: the table can be trained, or loaded again."""
        super().close()
        self._table.exported = False
