# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A table under torch's own optimizer, whose touched rows all owners update together.

One owner alone would still be at it when the others have updated all the rest. Owners
step aliases of the table's weight with disjoint rows of its gradient; what is kept per
row is shared, what is kept per table (a step count) each has a copy of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# These read and write nothing but the rows of a sparse gradient.
_BY_ROW = (torch.optim.Adagrad, torch.optim.SGD, torch.optim.SparseAdam)


def _is_per_table(name: str, value: Any, weight: torch.Tensor) -> bool:
    return not isinstance(value, torch.Tensor) or value.shape != weight.shape


class RowParts:
    """One table of one optimizer. From one thread at a time, but for ``take``."""

    def __init__(
        self, weight: nn.Parameter, index: int, optimizer: Optimizer, owners: int
    ) -> None:
        """Makes an alias per owner.

        Args:
            weight: the table's, ``[rows, dim]``.
            index: its place among the model's parameters.
            optimizer: whose parameter it is.
            owners: how many.
        """
        self.weight = weight
        self.index = index
        self.optimizer = optimizer
        self.aliases = [nn.Parameter(weight.detach()) for _ in range(owners)]
        self.active = False
        self._states: list[dict[str, Any]] = []
        self._sources: list[torch.Tensor] = []

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """Whether an optimizer keeps to the rows of a gradient."""
        return type(optimizer) in _BY_ROW

    def prepare(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Looks whether this step's rows can be dealt; before the owners begin.

        Not in the first step, in which torch makes the state of some optimizers, and
        not with options that touch every row.

        Args:
            grads: by replica.
        """
        state = self.optimizer.state.get(self.weight, {})
        group = next(
            group
            for group in self.optimizer.param_groups
            if any(parameter is self.weight for parameter in group["params"])
        )
        lazy = not group.get("momentum") and not group.get("weight_decay")
        made = bool(state) or type(self.optimizer) is torch.optim.SGD
        self._sources = [grad for grad in grads if grad is not None]
        self.active = (
            lazy
            and made
            and bool(self._sources)
            and all(grad.layout == torch.sparse_coo for grad in self._sources)
        )
        self._states = [self._state_for_owner(state) for _ in self.aliases]
        for alias in self.aliases:
            alias.grad = None
            if alias.data_ptr() != self.weight.data_ptr():
                alias.data = self.weight.data

    def _state_for_owner(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value.clone()
            if isinstance(value, torch.Tensor)
            and _is_per_table(name, value, self.weight)
            else value
            for name, value in state.items()
        }

    def state_of(self, owner: int) -> dict[str, Any]:
        """The state that an owner's step reads and writes."""
        return self._states[owner]

    def take(self, owner: int) -> None:
        """Sums an owner's rows into its alias; run by its thread."""
        count = len(self.aliases)
        keys, values = [], []
        for grad in self._sources:
            found = grad._indices()[0]
            mine = (found % count == owner).nonzero().squeeze(1)
            keys.append(found[mine])
            values.append(grad._values().index_select(0, mine))
        joined = torch.cat(keys)
        if len(joined):
            self.aliases[owner].grad = torch.sparse_coo_tensor(
                joined[None],
                torch.cat(values),
                self.weight.shape,
                check_invariants=False,
            ).coalesce()

    def finish(self) -> None:
        """Puts gradient and state together again, when all owners have stepped."""
        self._sources = []
        pairs = zip(self.aliases, self._states, strict=True)
        stepped = [(alias.grad, own) for alias, own in pairs if alias.grad is not None]
        for alias in self.aliases:
            alias.grad = None
        if not self.active or not stepped:
            return
        grads = [grad for grad, _ in stepped]
        self.weight.grad = torch.sparse_coo_tensor(
            torch.cat([grad._indices() for grad in grads], dim=1),
            torch.cat([grad._values() for grad in grads]),
            self.weight.shape,
            check_invariants=False,
        )
        state = self.optimizer.state[self.weight]
        for name, value in stepped[0][1].items():
            if _is_per_table(name, value, self.weight):
                if isinstance(value, torch.Tensor):
                    state[name].copy_(value)
                else:
                    state[name] = value


class OwnersState(dict[torch.Tensor, Any]):
    """The state of an owner's optimizer: of its aliases, else the common one."""

    def __init__(
        self, common: dict[torch.Tensor, Any], parts: Sequence[RowParts], owner: int
    ) -> None:
        """``parts``: tables whose rows are dealt in this step."""
        super().__init__({part.aliases[owner]: part.state_of(owner) for part in parts})
        self._common = common

    def __missing__(self, parameter: torch.Tensor) -> Any:
        """Reads, or makes, the state that all owners have in common."""
        return self._common[parameter]
