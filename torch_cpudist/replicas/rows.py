# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables that are stepped by row: which of them, how, and by whom.

A step passes over the rows once where torch's sparse operators sort, search and copy
them several times, and is one call for all tables, in which nobody has Python's lock.
State stays where the optimizer keeps it; the numbers are those of torch's step, but for
rounding. Owners share the rows of a table out: one alone would still be at it when the
others have updated all the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torch_cpudist import _core, optim
from torch_cpudist.errors import UnsupportedOptimizerError
from torch_cpudist.ops.tables import Piece, TablesStep, TableStep
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.replicas.pieces import gradient_of, has_rows, piece_of
from torch_cpudist.rules.read import read_group
from torch_cpudist.rules.state_parts import StatePart, part_shape, state_parts

# Fewer rows of all replicas are done by one thread before several have shared them out.
DEAL_FROM_ROWS = 4096
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


@dataclass(frozen=True)
class _Rule:
    """What a group's options make of the rows of its tables."""

    config: _core.OptimizerConfig
    parts: list[StatePart]
    ascend: bool


def _rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> _Rule | None:
    """``None`` where torch has to do it: options that touch every row."""
    momentum, decay = group.get("momentum"), group.get("weight_decay")
    of_torch = type(optimizer).__module__.startswith("torch.")
    if not fits_class(optimizer) or momentum or (decay and of_torch):
        return None
    try:
        config = read_group(optimizer, {**group, "maximize": False})
    except UnsupportedOptimizerError:
        return None
    return _Rule(config, state_parts(config), bool(group.get("maximize")))


class RowStep:
    """What one step does to the rows of one table."""

    def __init__(self, rule: _Rule, step: int) -> None:
        """See ``of``."""
        self._rule = rule
        self._step = step

    @staticmethod
    def of(
        rule: _Rule, state: Mapping[str, Any], weight: torch.Tensor
    ) -> RowStep | None:
        """The coming step, with the options and the state of this moment.

        Args:
            rule: of the table's group.
            state: what the optimizer has of the table.
            weight: the table's, ``[rows, dim]``.

        Returns:
            ``None`` where torch has to do it: state that its first step makes, or
            tensors that the kernels do not take.
        """
        if weight.dtype not in (torch.float32, torch.float64) or weight.dim() != 2:
            return None
        for part in rule.parts:
            kept = state.get(part.name)
            if (
                not isinstance(kept, torch.Tensor)
                or kept.dtype != weight.dtype
                or kept.shape != part_shape(part, weight.shape)
                or not kept.is_contiguous()
            ):
                return None
        if (rule.parts and "step" not in state) or not weight.is_contiguous():
            return None
        return RowStep(rule, int(state.get("step", 0)) + 1)

    def on(
        self, weight: torch.Tensor, state: Mapping[str, Any], first: int = 0
    ) -> TableStep:
        """The step for the kernels.

        Args:
            weight: ``[rows, dim]``, that of ``of`` or a copy.
            state: what the optimizer keeps for ``weight``.
            first: the owner of all rows where there are few.
        """
        rule = self._rule
        states = [state[part.name] for part in rule.parts]
        return TableStep(weight, states, rule.config, self._step, rule.ascend, first)

    def count(self, state: MutableMapping[str, Any]) -> None:
        """Counts the step where an optimizer does; by one thread, at the end."""
        if "step" in state:
            state["step"] += 1


@dataclass(frozen=True)
class RowTable:
    """A table and who steps it.

    Attributes:
        weight: ``[rows, dim]``.
        index: its place among the model's parameters.
        optimizer: whose parameter it is.
        optimizer_index: the optimizer's place among the executor's.
    """

    weight: nn.Parameter
    index: int
    optimizer: Optimizer
    optimizer_index: int

    def state(self) -> Mapping[str, Any]:
        """What the optimizer keeps for it; a look that makes nothing."""
        found: Mapping[str, Any] = self.optimizer.state.get(self.weight, {})
        return found

    def pieces(self, models: ReplicaModels, summed: bool) -> list[Piece]:
        """Its gradient: the model's, or those of the replicas in their order.

        Empty where there is none, and where it is not one of rows.
        """
        if not summed:
            return models.pieces_of(self.index)
        grad = self.weight.grad
        return [piece_of(grad)] if grad is not None and has_rows(grad) else []


def row_steps(
    optimizers: Sequence[Optimizer],
    divisible: Sequence[bool],
    models: ReplicaModels,
    summed: bool,
) -> Iterator[tuple[RowTable, RowStep, list[Piece]]]:
    """Yields the tables that are stepped by row in this step, how, and by what.

    The same for replicas that share a table as for those that have copies. Not a table
    of several optimizers, whose steps have an order.

    Args:
        optimizers: of the executor.
        divisible: which of them may step parts of their parameters.
        models: have the gradients.
        summed: whether they are in the model by now; else they are the replicas'.
    """
    found = list(_tables(optimizers, models))
    times = Counter(table.index for table, _ in found)
    # By id of a group, which may have many tables.
    rules: dict[int, _Rule | None] = {}
    for table, group in found:
        if times[table.index] > 1 or not divisible[table.optimizer_index]:
            continue
        pieces = table.pieces(models, summed)
        if not pieces:
            continue
        if id(group) not in rules:
            rules[id(group)] = _rule_of(table.optimizer, group)
        rule = rules[id(group)]
        step = None if rule is None else RowStep.of(rule, table.state(), table.weight)
        if step is not None:
            yield table, step, pieces


def _tables(
    optimizers: Sequence[Optimizer], models: ReplicaModels
) -> Iterator[tuple[RowTable, dict[str, Any]]]:
    """Yields the tables of all optimizers, each with its group of today."""
    for i, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                index = models.tables.get(id(weight))
                if index is not None:
                    yield RowTable(weight, index, optimizer, i), group


class OwnedRows:
    """The rows of all such tables in one step, shared out among owners by their keys.

    One thread at a time, but for ``step``.
    """

    def __init__(
        self,
        tables: Sequence[tuple[RowTable, RowStep, list[Piece]]],
        owner_of: Mapping[int, int],
        owners: int,
    ) -> None:
        """Packs what all owners need.

        Args:
            tables: from ``row_steps``.
            owner_of: by ``id`` of a weight, whose it is where it has few rows.
            owners: how many there are.
        """
        self._tables = [(table, step) for table, step, _ in tables]
        self._firsts = [owner_of[id(table.weight)] for table, _ in self._tables]
        #: Places of the tables among the model's parameters.
        self.indices = frozenset(table.index for table, _ in self._tables)
        self._step = TablesStep(
            [pieces for _, _, pieces in tables],
            [
                step.on(table.weight, table.state(), first)
                for (table, step), first in zip(self._tables, self._firsts, strict=True)
            ],
        )
        self._sums: list[list[Piece]] = [[] for _ in range(owners)]

    def step(self, owner: int) -> None:
        """Sums an owner's rows of all tables and steps them; run by its thread."""
        self._sums[owner] = self._step.run(owner, len(self._sums), DEAL_FROM_ROWS)

    def finish(self) -> None:
        """Counts the step, when all owners have stepped."""
        for table, step in self._tables:
            state = table.optimizer.state
            if table.weight in state:
                step.count(state[table.weight])

    def set_gradients(self) -> None:
        """Gives the weights the sums of their gradients, every key once."""
        for i, (table, _) in enumerate(self._tables):
            first = self._firsts[i]
            others = [sums for o, sums in enumerate(self._sums) if o != first]
            parts = [sums[i] for sums in (self._sums[first], *others)]
            held = [part for part in parts if len(part[0])] or parts[:1]
            keys, rows = held[0]
            if len(held) > 1:
                keys = torch.cat([part[0] for part in held])
                rows = torch.cat([part[1] for part in held])
            table.weight.grad = gradient_of((keys, rows), table.weight)
