# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A step of an optimizer on the touched rows of a table, by the servers' kernels.

They pass over the rows once where torch's sparse operators sort, search and copy them
several times. State stays where the optimizer keeps it; the numbers are those of
torch's step, but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer

from torch_cpudist import _core, ops, optim
from torch_cpudist.errors import UnsupportedOptimizerError
from torch_cpudist.rules.read import read_group
from torch_cpudist.rules.state_parts import part_shape, state_parts

# These read and write nothing but the rows of a sparse gradient.
_BY_ROW = (
    optim.FTRL,
    optim.RowWiseAdagrad,
    torch.optim.Adagrad,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)


def fits_class(optimizer: Optimizer) -> bool:
    """Whether an optimizer is of a class that keeps to the rows of a gradient."""
    return type(optimizer) in _BY_ROW


class RowStep:
    """What one step does to the rows of one table. ``run`` is thread-safe.

    Disjoint rows may be stepped by several threads at once.
    """

    def __init__(
        self, config: _core.OptimizerConfig, names: list[str], step: int, ascend: bool
    ) -> None:
        """See ``of``."""
        self._config = config
        self._names = names
        self._step = step
        self._ascend = ascend

    @staticmethod
    def of(
        optimizer: Optimizer, group: Mapping[str, Any], weight: torch.Tensor
    ) -> RowStep | None:
        """The coming step, with the options and the state of this moment.

        Args:
            optimizer: of a class that ``fits_class``.
            group: that of its groups which has ``weight``.
            weight: the table's, ``[rows, dim]``.

        Returns:
            ``None`` where torch has to do it: options that touch every row, state that
            its first step makes, or tensors that the kernels do not take.
        """
        momentum, decay = group.get("momentum"), group.get("weight_decay")
        of_torch = type(optimizer).__module__.startswith("torch.")
        if momentum or (decay and of_torch):
            return None
        if weight.dtype not in (torch.float32, torch.float64) or weight.dim() != 2:
            return None
        ascend = bool(group.get("maximize"))
        try:
            config = read_group(optimizer, {**group, "maximize": False})
        except UnsupportedOptimizerError:
            return None
        state = optimizer.state.get(weight, {})
        parts = state_parts(config)
        for part in parts:
            kept = state.get(part.name)
            if (
                not isinstance(kept, torch.Tensor)
                or kept.dtype != weight.dtype
                or kept.shape != part_shape(part, weight.shape)
                or not kept.is_contiguous()
            ):
                return None
        if (parts and "step" not in state) or not weight.is_contiguous():
            return None
        names = [part.name for part in parts]
        return RowStep(config, names, int(state.get("step", 0)) + 1, ascend)

    def run(
        self,
        weight: torch.Tensor,
        state: Mapping[str, Any],
        keys: torch.Tensor,
        grads: torch.Tensor,
    ) -> None:
        """Steps some rows in place. Not recorded by autograd.

        Args:
            weight: ``[rows, dim]``, that of ``of`` or a copy.
            state: what the optimizer keeps for ``weight``.
            keys: int64 ``[n]``, distinct.
            grads: ``[n, dim]``, left as they are.
        """
        grads = -grads if self._ascend else grads
        kept = [state[name] for name in self._names]
        if len(kept) < 2:
            none = weight.new_empty((len(weight), 0))
            whole = kept[0].view(len(weight), -1) if kept else none
            self._update(weight, whole, keys, grads)
            return
        # The kernels have the state of a row in one piece.
        rows = ops.gather_rows(weight, keys)
        pieces = [ops.gather_rows(tensor, keys) for tensor in kept]
        joined = torch.cat(pieces, dim=1)
        self._update(rows, joined, torch.arange(len(keys)), grads)
        ops.scatter_rows(weight, keys, rows)
        for tensor, piece in zip(kept, joined.chunk(len(kept), 1), strict=True):
            ops.scatter_rows(tensor, keys, piece.contiguous())

    def _update(
        self,
        weight: torch.Tensor,
        state: torch.Tensor,
        keys: torch.Tensor,
        grads: torch.Tensor,
    ) -> None:
        ops.update_rows(weight, state, keys, grads, self._config, step=self._step)

    def count(self, state: MutableMapping[str, Any]) -> None:
        """Counts the step where an optimizer does; by one thread, after ``run``."""
        if "step" in state:
            state["step"] += 1
