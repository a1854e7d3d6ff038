# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parameter groups of the wrapped optimizers, and by which rule each is updated."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from torch_cpudist import _core
from torch_cpudist.errors import InvalidArgumentError, UnsupportedOptimizerError
from torch_cpudist.model.placement import Placement, Rules
from torch_cpudist.rules.read import (
    check_any,
    check_optimizer,
    check_optimizers,
    check_use,
    is_known,
    l1_decay,
    read_group,
)
from torch_cpudist.strategies.base import Strategy


def wrapped(optimizer: object, model: object) -> list[torch.optim.Optimizer]:
    """The optimizers that ``DistributedOptimizer`` is given, as a list.

    Raises:
        InvalidArgumentError: they are none, or not a module's.
    """
    if isinstance(optimizer, nn.Module) or isinstance(model, torch.optim.Optimizer):
        raise InvalidArgumentError(
            "DistributedOptimizer(optimizer, model): the optimizer comes first; found "
            f"{type(optimizer).__name__}, {type(model).__name__}."
        )
    if model is None or isinstance(model, (Strategy, str, Mapping)):
        raise InvalidArgumentError(
            "DistributedOptimizer(optimizer, model): the model is missing. Pass the "
            "nn.Module whose parameters the optimizer has, second: its sparse "
            "embeddings are the tables."
        )
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            "DistributedOptimizer(optimizer, model): the model must be an nn.Module, "
            f"got {type(model).__name__}."
        )
    listed = isinstance(optimizer, (list, tuple))
    entries = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    found: list[torch.optim.Optimizer] = []
    for entry in entries:
        if not isinstance(entry, torch.optim.Optimizer):
            where = "each entry of the list" if listed else "the optimizer"
            kind = entry if isinstance(entry, type) else type(entry)
            raise InvalidArgumentError(
                f"DistributedOptimizer(optimizer, model): {where} must be a "
                f"torch.optim.Optimizer, got {kind.__name__}."
            )
        found.append(entry)
    return found


class OptimizerGroups:
    """All groups of all wrapped optimizers, in order. No messages; not thread-safe.

    Where the optimizer runs on the trainer, torch itself updates the dense parameters,
    and only groups that hold a table need a rule that this package knows.
    """

    def __init__(self, inners: Sequence[torch.optim.Optimizer], local: bool) -> None:
        """Looks at ``inners``.

        Args:
            inners: the wrapped optimizers.
            local: whether they run on the trainer.

        Raises:
            InvalidArgumentError: there is none.
            UnsupportedOptimizerError: one that cannot run here.
        """
        self._local = local
        if not local:
            check_optimizers(inners)
        else:
            check_any(inners)
            for inner in inners:
                _check_step_alone(inner)
        self._owners = [inner for inner in inners for _ in inner.param_groups]
        self._groups = [group for inner in inners for group in inner.param_groups]
        self._with_tables: set[int] = set()
        self._with_dense: set[int] = set()

    def rules(self) -> Rules:
        """Reads the rule of each group as its options stand now.

        Raises:
            UnsupportedOptimizerError: an option has a value that is not honoured.
        """
        if not self._local:
            return self._read()
        return [self._read_or_none(i) for i in range(len(self._groups))]

    def _read(self) -> list[_core.OptimizerConfig]:
        pairs = zip(self._owners, self._groups, strict=True)
        return [
            read_group(owner, group, l1_decay(owner, group)) for owner, group in pairs
        ]

    def _read_or_none(self, i: int) -> _core.OptimizerConfig | None:
        owner, group = self._owners[i], self._groups[i]
        known = is_known(owner)
        decay = l1_decay(owner, group)
        if decay and i in self._with_dense:
            _refuse_decay(owner, decay)
        try:
            if known or i in self._with_tables:
                return read_group(owner, group, decay)
        except UnsupportedOptimizerError:
            if i in self._with_tables:
                raise
        return None

    def check_use(self, placement: Placement) -> None:
        """Refuses rules that cannot run on what they hold.

        Raises:
            UnsupportedOptimizerError: names the parameter.
        """
        for table in placement.tables:
            owner, group = self._owners[table.group], self._groups[table.group]
            check_optimizer(owner)
            config = read_group(owner, group)
            check_use(owner, config, table.found.name, table=True)
            self._with_tables.add(table.group)
        for entry in placement.dense:
            owner, group = self._owners[entry.group], self._groups[entry.group]
            if self._local:
                self._with_dense.add(entry.group)
                if decay := l1_decay(owner, group):
                    _refuse_decay(owner, decay)
            rule = placement.rules[entry.group]
            if rule is not None:
                check_use(owner, rule, entry.name, table=False)


def _refuse_decay(owner: torch.optim.Optimizer, decay: float) -> NoReturn:
    raise UnsupportedOptimizerError(
        f"l1_decay={decay} of a group of {type(owner).__name__} that holds dense "
        "parameters, which torch steps on the trainer under this strategy and which "
        "knows no such option. Give tables a group of their own, and add a term to the "
        "loss for dense parameters, or use Sync, Async or HalfAsync."
    )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` of an optimizer evaluates the model by itself."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_step_alone(inner: torch.optim.Optimizer) -> None:
    if needs_closure(inner):
        raise UnsupportedOptimizerError(
            f"{type(inner).__name__}.step() evaluates the model several times by a "
            "closure, which this version does not run. Use an optimizer whose step() "
            "needs none."
        )
