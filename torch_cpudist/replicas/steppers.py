# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers made after the user's, that step parts or copies of their parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from torch_cpudist import optim

# What these do to a parameter depends on nothing but its own gradient and state.
_BY_PARAMETER: frozenset[type[Optimizer]] = frozenset(
    {
        optim.FTRL,
        optim.RowWiseAdagrad,
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        torch.optim.SparseAdam,
    }
)
_PLAIN = (bool, int, float, str)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _is_hooked(optimizer: Optimizer) -> bool:
    """Whether somebody wants to be there when this optimizer steps."""
    step = vars(optimizer).get("step")
    if step is not None and not (
        getattr(step, "_wrapped_by_lr_sched", False)
        and step.__wrapped__ is type(optimizer).step
    ):
        return True
    return bool(
        torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or any(getattr(optimizer, name) for name in _HOOKS)
    )


def divisible(optimizers: Sequence[Optimizer]) -> list[bool]:
    """Which optimizers may step parts of their parameters by themselves.

    None of them where some have parameters in common, whose steps have an order, and
    one is to step as a whole.
    """
    found = [type(o) in _BY_PARAMETER and not _is_hooked(o) for o in optimizers]
    if all(found) or not any(found):
        return found
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    common = len({id(p) for p in parameters}) < len(parameters)
    return [False] * len(found) if common else found


def likeness(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and options, to be given groups and state."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made.__dict__.pop("step", None)  # a scheduler's wrapper, of the original
    for name in _HOOKS:
        made.__dict__[name] = OrderedDict()
    return made


def groups_of(
    optimizer: Optimizer, own: Callable[[torch.Tensor], torch.Tensor | None]
) -> list[dict[str, Any]]:
    """Groups with today's options, of the parameters that ``own`` gives for theirs."""
    return [
        {
            **group,
            "params": [p for p in map(own, group["params"]) if p is not None],
        }
        for group in optimizer.param_groups
    ]


def marks(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Changes when somebody loads, clears or edits the state of optimizers.

    Writing through ``tensor.data`` is not seen. Cost: a few hundred ns per entry.
    """
    found: list[Any] = []
    for optimizer in optimizers:
        found.append(len(optimizer.state))
        for parameter, state in optimizer.state.items():
            found.append(id(parameter))
            for value in state.values() if isinstance(state, dict) else ():
                found.append(id(value))
                if isinstance(value, torch.Tensor):
                    found.append(value._version)
                elif isinstance(value, _PLAIN):
                    found.append(value)
    return found


def copied_state(
    optimizer: Optimizer, view_of: Mapping[int, nn.Parameter]
) -> defaultdict[torch.Tensor, Any]:
    """A copy of an optimizer's state, by a replica's parameters.

    Args:
        optimizer: of the model.
        view_of: by ``id`` of a parameter of the model, the replica's.
    """
    made: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        made[view_of[id(parameter)]] = copy.deepcopy(state)
    return made
