# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Notices what a script does to the wrapped optimizers behind the wrapper's back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torch_cpudist.errors import ModelChangedError
from torch_cpudist.model.placement import Placement


class InnerGuard:
    """Watches wrapped optimizers from wrapping to ``release()``.

    Their ``step``, ``state_dict`` and ``load_state_dict`` raise; what hooks cannot see
    is found by ``check``. No messages. Not thread-safe.
    """

    def __init__(
        self,
        inners: Sequence[torch.optim.Optimizer],
        model: nn.Module,
        placement: Placement,
        names: dict[int, str],
    ) -> None:
        """Begins to watch.

        Args:
            inners: the wrapped optimizers.
            model: whose parameters they train.
            placement: what of theirs is trained.
            names: by ``id`` of a parameter, its name.
        """
        self._inners = list(inners)
        self._groups = [list(inner.param_groups) for inner in inners]
        self._parameters = [
            [list(group["params"]) for group in inner.param_groups] for inner in inners
        ]
        trained = {id(table.found.weight) for table in placement.tables}
        trained |= {id(entry.parameter) for entry in placement.dense}
        self._owners = [
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in trained
        ]
        self._model = model
        self._trained = trained
        self._children = _holders(model, trained)
        self._untrained: list[tuple[str, nn.Parameter]] = [
            (names[id(parameter)], parameter)
            for groups in self._parameters
            for parameters in groups
            for parameter in parameters
            if id(parameter) not in trained and parameter.numel() > 0
        ]
        self._stepping = False
        self._hooks: list[RemovableHandle] = []
        for inner in self._inners:
            self._hooks += (
                inner.register_step_pre_hook(self._refusal("step")),
                inner.register_state_dict_pre_hook(self._refusal("state_dict")),
                inner.register_load_state_dict_pre_hook(
                    self._refusal("load_state_dict")
                ),
            )

    def _refusal(self, what: str) -> Callable[..., None]:
        def refuse(*_: Any) -> None:
            if self._stepping and what == "step":
                return
            raise ModelChangedError(
                f"{what}() was called on an optimizer that a DistributedOptimizer "
                f"wraps, which does its updates and keeps its state. Call {what}() on "
                "the DistributedOptimizer."
            )

        return refuse

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """While it is entered, the wrapped optimizers may step."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check(self) -> None:
        """Raises for a change that would be ignored.

        Cost: a look at each parameter and module.

        Raises:
            ModelChangedError: other groups, modules or parameters than when wrapped, in
                the optimizers or in the model, or a gradient on a parameter that was
                frozen then.
        """
        for inner, groups, lists in zip(
            self._inners, self._groups, self._parameters, strict=True
        ):
            if not _same(inner.param_groups, groups) or not all(
                _same(group["params"], parameters)
                for group, parameters in zip(groups, lists, strict=True)
            ):
                raise ModelChangedError(
                    f"the parameter groups of the wrapped {type(inner).__name__} are "
                    "others than when it was wrapped (add_param_group, or groups that "
                    "were replaced). Build a new DistributedOptimizer over it."
                )
        for module, name, parameter in self._owners:
            if module._parameters.get(name) is not parameter:
                raise ModelChangedError(
                    f"{type(module).__name__}.{name} is another parameter than the one "
                    "that its optimizer trains. load_state_dict(assign=True) replaces "
                    "parameters: load without assign and call opt.store_model(), or "
                    "close() the DistributedOptimizer and build the optimizers anew."
                )
        if any(
            parent._modules.get(name) is not child
            for parent, name, child in self._children
        ):
            self._check_replaced()
        for name, parameter in self._untrained:
            if parameter.grad is not None:
                raise ModelChangedError(
                    f"parameter {name!r} has a gradient but was frozen when its "
                    "optimizer was wrapped, so that no server holds it. Build a new "
                    "DistributedOptimizer after requires_grad_(True), or freeze it "
                    "again and clear its gradient."
                )

    def _check_replaced(self) -> None:
        """Refuses modules in the place of those whose parameters are trained.

        One that was put around another, or taken out, has nothing that would go
        untrained.
        """
        present = {id(parameter) for parameter in self._model.parameters()}
        for parent, name, child in self._children:
            found = parent._modules.get(name)
            if found is child or found is None:
                continue
            gone = {id(p) for p in child.parameters()} & self._trained - present
            new = [p for p in found.parameters() if id(p) not in self._trained]
            if gone and any(p.requires_grad for p in new):
                raise ModelChangedError(
                    f"module {name!r} of the {type(parent).__name__}: another "
                    f"{type(found).__name__} is in the place of the "
                    f"{type(child).__name__} that was wrapped, and the wrapped "
                    "optimizers train none of its parameters. close() the "
                    "DistributedOptimizer and build the optimizers over the model as "
                    "it is now."
                )
        self._children = _holders(self._model, self._trained)

    def release(self) -> None:
        """Gives the optimizers back as they were. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _holders(
    model: nn.Module, trained: set[int]
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Every module below ``model`` that has something trained: parent, name, itself."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if any(id(parameter) in trained for parameter in child.parameters())
    ]


def _same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        a is b for a, b in zip(found, expected, strict=True)
    )
