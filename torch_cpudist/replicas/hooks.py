# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hooks that replicas would not run: of parameters, and of modules once copied.

A replica's backward ends at parameters of its own, so that hooks of the model's
parameters would be skipped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from torch_cpudist.collective.exchange import GradientExchange
from torch_cpudist.errors import UnsupportedModelError
from torch_cpudist.model.first_gradients import FirstGradients
from torch_cpudist.served.early import EarlyPushes
from torch_cpudist.tables.forwards import ForwardHook


def _is_own(hook: Callable[..., Any]) -> bool:
    """Whether this package put a hook there: the step does its work, too."""
    function = getattr(hook, "func", hook)
    owner = getattr(function, "__self__", None)
    return isinstance(owner, (EarlyPushes, FirstGradients, GradientExchange))


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Refuses a parameter of which the user wants to see or change the gradient.

    Raises:
        UnsupportedModelError: names the parameter.
    """
    before = parameter._backward_hooks
    after = parameter._post_accumulate_grad_hooks
    if not before and not after:
        return
    kind = "register_hook"
    if not before:
        if all(map(_is_own, after.values())):
            return
        kind = "register_post_accumulate_grad_hook"
    raise UnsupportedModelError(
        f"ReplicaExecutor: parameter {name!r} has a hook ({kind}), which would not "
        "run: replicas have gradients of their own. Remove it, and do its work on the "
        "summed gradient in before_update, or in loss_fn."
    )


def of_module(module: nn.Module) -> list[int]:
    """Numbers of a module's hooks but those that foresee lookups; all differ."""
    kinds: list[Mapping[int, Callable[..., Any]]] = [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]
    return [
        number
        for kind in kinds
        for number, hook in kind.items()
        if not isinstance(hook, ForwardHook)
    ]
