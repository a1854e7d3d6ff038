# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What users reach for in a ``torch.optim.Optimizer``: hooks and ``state``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from torch_cpudist.errors import InvalidArgumentError, UnsupportedOptimizerError


class StateOnServers(dict[Any, Any]):
    """The ``state`` of an optimizer whose state is on servers: empty, and says so."""

    def __missing__(self, key: object) -> NoReturn:
        """Refuses to show one parameter's state.

        Raises:
            UnsupportedOptimizerError: always.
        """
        raise UnsupportedOptimizerError(
            "the state of a DistributedOptimizer is on the servers: "
            "opt.state_dict()['state'] pulls it."
        )

    def get(self, key: object, default: object = None) -> NoReturn:
        """As ``__missing__``."""
        self.__missing__(key)


class ServedOptimizer(torch.optim.Optimizer):
    """Refuses what cannot work where servers hold the state."""

    groups_fixed = False  # once parameters are placed, and until the end

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses a group after construction: placement is fixed.

        Raises:
            UnsupportedOptimizerError: always, once built.
        """
        if self.groups_fixed:
            raise UnsupportedOptimizerError(
                "add_param_group: the placement of a DistributedOptimizer is fixed. "
                "Add the group to the inner optimizer and build a new one over it."
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # What torch.amp.GradScaler asks before it decides, alone, to skip a step.
        raise UnsupportedOptimizerError(
            "GradScaler skips steps on one trainer that the others take. Train with "
            "torch.autocast('cpu', dtype=torch.bfloat16), which needs no scaler."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses copies.

        Raises:
            UnsupportedOptimizerError: always; servers hold one of it.
        """
        raise UnsupportedOptimizerError(
            "a DistributedOptimizer cannot be copied or pickled: its state is on the "
            "servers. Save opt.state_dict(), and build another one over a copied model."
        )


def check_not_wrapped(optimizer: object) -> None:
    """Refuses to wrap what is wrapped already.

    Raises:
        InvalidArgumentError: it is a ``DistributedOptimizer``, or a list with one.
    """
    entries = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if any(isinstance(entry, ServedOptimizer) for entry in entries):
        raise InvalidArgumentError(
            "DistributedOptimizer(optimizer, model): the optimizer is a "
            "DistributedOptimizer already. Use it as it is; for another model or "
            "strategy wrap the torch.optim optimizer that it was built over."
        )


def shared_defaults(inners: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Defaults of options that all have: where schedulers look for momentum, betas."""
    first, *others = (inner.defaults for inner in inners)
    return {
        name: value
        for name, value in first.items()
        if all(name in other for other in others)
    }


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """What a step's closure returns, if there is one; with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def run_before_saving(optimizer: torch.optim.Optimizer) -> None:
    """Runs the hooks of ``register_state_dict_pre_hook``."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def run_after_saving(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Runs the hooks of ``register_state_dict_post_hook``; returns their result."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict


def run_before_loading(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Runs the hooks of ``register_load_state_dict_pre_hook`` on a shallow copy."""
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict


def run_after_loading(optimizer: torch.optim.Optimizer) -> None:
    """Runs the hooks of ``register_load_state_dict_post_hook``."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
