# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads a ``torch.optim`` optimizer: class and options choose the server's rule.

Nothing is guessed: a class or an option that the servers would not honour is refused by
name. Options that only choose an implementation (``foreach``, ``fused``,
``capturable``) change no number and are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_cpudist import _core
from torch_cpudist.errors import InvalidArgumentError, UnsupportedOptimizerError
from torch_cpudist.optim import FTRL, RowWiseAdagrad

Group = Mapping[str, Any]

# What tells AdamW from Adam in their groups.
DECOUPLED = "decoupled_weight_decay"
# An entry of a group: its strength times sign(w) is added to the gradient.
L1_DECAY = "l1_decay"

# Options that choose how torch computes, not what.
_IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable"})


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _sgd(group: Group) -> dict[str, Any]:
    return {
        "kind": "sgd",
        "lr": _number(group["lr"]),
        "momentum": _number(group["momentum"]),
        "dampening": _number(group["dampening"]),
        "weight_decay": _number(group["weight_decay"]),
        "nesterov": bool(group["nesterov"]),
    }


def _adagrad(group: Group) -> dict[str, Any]:
    return {
        "kind": "adagrad",
        "lr": _number(group["lr"]),
        "lr_decay": _number(group["lr_decay"]),
        "weight_decay": _number(group["weight_decay"]),
        "initial_accumulator": _number(group["initial_accumulator_value"]),
        "eps": _number(group["eps"]),
    }


def _row_wise_adagrad(group: Group) -> dict[str, Any]:
    return _adagrad(group) | {"kind": "row_wise_adagrad"}


def _adam_family(kind: str) -> Callable[[Group], dict[str, Any]]:
    def read(group: Group) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        decoupled = kind == "adam" and bool(group.get("decoupled_weight_decay"))
        return {
            "kind": "adamw" if decoupled else kind,
            "lr": _number(group["lr"]),
            "beta1": _number(beta1),
            "beta2": _number(beta2),
            "eps": _number(group["eps"]),
            "weight_decay": _number(group.get("weight_decay", 0.0)),
        }

    return read


def _rmsprop(group: Group) -> dict[str, Any]:
    return {
        "kind": "rmsprop",
        "lr": _number(group["lr"]),
        "alpha": _number(group["alpha"]),
        "eps": _number(group["eps"]),
        "weight_decay": _number(group["weight_decay"]),
        "momentum": _number(group["momentum"]),
    }


def _ftrl(group: Group) -> dict[str, Any]:
    return {
        "kind": "ftrl",
        "lr": _number(group["lr"]),
        "lr_power": _number(group["lr_power"]),
        "l1": _number(group["l1"]),
        "l2": _number(group["l2"]),
        "eps": _number(group["beta"]),
        "initial_accumulator": _number(group["initial_accumulator_value"]),
    }


# Exact class -> (reader, names of the options it honours). AdamW is a subclass of
# Adam, so a subclass is never taken for its parent.
_RULES: dict[type, tuple[Callable[[Group], dict[str, Any]], frozenset[str]]] = {
    torch.optim.SGD: (
        _sgd,
        frozenset({"lr", "momentum", "dampening", "weight_decay", "nesterov"}),
    ),
    torch.optim.Adagrad: (
        _adagrad,
        frozenset(
            {"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"}
        ),
    ),
    RowWiseAdagrad: (
        _row_wise_adagrad,
        frozenset(
            {"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"}
        ),
    ),
    torch.optim.Adam: (
        _adam_family("adam"),
        frozenset({"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"}),
    ),
    torch.optim.AdamW: (
        _adam_family("adamw"),
        frozenset({"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"}),
    ),
    torch.optim.SparseAdam: (
        _adam_family("sparse_adam"),
        frozenset({"lr", "betas", "eps"}),
    ),
    torch.optim.RMSprop: (
        _rmsprop,
        frozenset({"lr", "alpha", "eps", "weight_decay", "momentum"}),
    ),
    FTRL: (
        _ftrl,
        frozenset({"lr", "lr_power", "l1", "l2", "beta", "initial_accumulator_value"}),
    ),
}


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer whose class the servers cannot run.

    Raises:
        UnsupportedOptimizerError: names the class and the classes that work.
    """
    if not is_known(optimizer):
        known = ", ".join(sorted(rule.__name__ for rule in _RULES))
        raise UnsupportedOptimizerError(
            f"the servers cannot run {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}; they run exactly these classes: {known}. "
            "Use one of them."
        )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuses an empty list, and what ``check_optimizer`` refuses.

    Raises:
        InvalidArgumentError: the list is empty.
        UnsupportedOptimizerError: see ``check_optimizer``.
    """
    check_any(optimizers)
    for optimizer in optimizers:
        check_optimizer(optimizer)


def check_any(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuses an empty list.

    Raises:
        InvalidArgumentError: the list is empty.
    """
    if not optimizers:
        raise InvalidArgumentError(
            "DistributedOptimizer: the list of optimizers is empty"
        )


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this class is one whose rule this package runs itself."""
    return type(optimizer) in _RULES


def required_options(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Names of the options that a saved group of a checked optimizer must have."""
    # Adam's groups that older versions of torch saved lack this one.
    return _RULES[type(optimizer)][1] - {DECOUPLED}


def known_options() -> frozenset[str]:
    """Names of the options of all optimizers that the servers run."""
    return frozenset().union(*(honoured for _, honoured in _RULES.values()))


def l1_decay(optimizer: torch.optim.Optimizer, group: Group) -> float:
    """The L1 decay of a group: its entry ``l1_decay``, which torch knows nothing of.

    Args:
        optimizer: the optimizer that has the group.
        group: one of its ``param_groups``, as of this step.

    Raises:
        InvalidArgumentError: it is negative or no finite number.
        UnsupportedOptimizerError: of FTRL, whose ``l1`` is another thing.
    """
    given = group.get(L1_DECAY, 0.0)
    try:
        strength = _number(given)
    except (TypeError, ValueError):
        strength = math.nan
    if not (math.isfinite(strength) and strength >= 0):
        raise InvalidArgumentError(
            f"param_groups: {L1_DECAY} must be a finite number >= 0, got {given!r}"
        )
    if strength and type(optimizer) is FTRL:
        raise UnsupportedOptimizerError(
            f"FTRL has an L1 penalty of its own, which makes weights exactly 0: set "
            f"its option l1 in the place of {L1_DECAY}={strength}."
        )
    return strength


def read_group(
    optimizer: torch.optim.Optimizer, group: Group, decay: float = 0.0
) -> _core.OptimizerConfig:
    """Reads one parameter group of a checked optimizer.

    Args:
        optimizer: the optimizer; only its class is looked at.
        group: one of its ``param_groups``, as of this step.
        decay: from ``l1_decay``, where this package runs the rule.

    Returns:
        The configuration that travels with a push.

    Raises:
        UnsupportedOptimizerError: an option has a value the servers do not honour
            (``amsgrad``, ``maximize``, ``centered``, ``differentiable``).
    """
    reader, honoured = _RULES[type(optimizer)]
    accepted = honoured | _IMPLEMENTATION_OPTIONS
    # torch ignores what else stands in a group: notes of schedulers, names, tags.
    for name in optimizer.defaults:
        value = group.get(name)
        if name not in accepted and value is not None and value is not False:
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__}: the servers do not honour the option "
                f"{name}={value!r}. Leave it at its default (off)."
            )
    options = reader(group)
    if decay:
        options["l1"] = decay
    return _core.OptimizerConfig(**options)


def check_use(
    optimizer: torch.optim.Optimizer,
    config: _core.OptimizerConfig,
    name: str,
    table: bool,
) -> None:
    """Refuses an optimizer that cannot run on this kind of parameter.

    Args:
        optimizer: the optimizer that holds the parameter.
        config: its configuration for the parameter's group.
        name: the parameter's name, for the message.
        table: whether the parameter is a table.

    Raises:
        UnsupportedOptimizerError: SparseAdam on a dense parameter, as torch refuses it.
    """
    if not table and config.kind == "sparse_adam":
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} takes sparse gradients only, but {name!r} is "
            "a dense parameter. Give the dense parameters to another optimizer and "
            "pass a list: DistributedOptimizer([SparseAdam(tables), AdamW(rest)], "
            "model)."
        )
