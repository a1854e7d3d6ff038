# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables of a replica: lookups pull rows into the weight that all replicas share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from torch_cpudist.tables.binding import TableBinding
from torch_cpudist.tables.local import (
    EmbeddingModule,
    attach,
    binding_of,
    plain_class,
)


class TableView(TableBinding):
    """The binding of a table, for a module whose weight is a view of the bound one.

    Thread safety: as ``TableBinding``; replicas that look up one table take turns.
    """

    def __init__(self, binding: TableBinding, weight: nn.Parameter) -> None:
        """Shares ``binding``, whose rows come into the memory of ``weight``."""
        self._shared = binding
        self.weight = weight
        self.name = binding.name
        # One handle for all replicas: graphs that guard it serve them all.
        self.handle = binding.handle
        self.device = binding.device
        self.remote = binding.remote

    def read(self, keys: torch.Tensor | None = None) -> None:
        """Brings in rows, in the memory of both; see ``TableBinding.read``."""
        self._shared.read(keys)

    def written(self) -> None:
        """Notes that somebody wrote the weight that all replicas share."""
        self._shared.written()

    def pull(self, ids: torch.Tensor, weight: torch.Tensor) -> None:
        """Makes the rows of ``ids`` current; see ``TableBinding.pull``."""
        self.check_weight(weight)
        self._shared.pull(ids, self._shared.weight)


def copied_tables(model: nn.Module, memo: dict[int, Any]) -> None:
    """Copies the table modules of a wrapped model, for ``copy.deepcopy``.

    A deep copy of such a module is a plain one, without servers; a replica's is not.

    Args:
        model: any module.
        memo: what is copied already, parameters among it; gets the copies.
    """
    for module in model.modules():
        if (binding := binding_of(module)) is not None:
            memo[id(module)] = _copied(module, binding, memo)


def _copied(
    module: Any, binding: TableBinding, memo: dict[int, Any]
) -> EmbeddingModule:
    kind: Any = plain_class(module)
    made: EmbeddingModule = kind.__new__(kind)
    memo[id(module)] = made
    made.__dict__ = {
        name: copy.deepcopy(value, memo)
        for name, value in module.__dict__.items()
        if not name.startswith("_cpudist_")
    }
    view = memo[id(binding.weight)]
    attach(made, TableView(binding, view))
    return made
