# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two optimizers that recommendation models use and torch lacks.

Both are ordinary ``torch.optim`` optimizers, for dense and sparse gradients, usable
without this package's servers; the servers run the same formulas in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class _RowsOptimizer(torch.optim.Optimizer):
    """Shared loop: hands each parameter, or its touched rows, to ``_update``."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned, else ``None``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._init_state(group, parameter, state)
                state["step"] += 1
                if parameter.grad.is_sparse:
                    self._update_rows(group, parameter, parameter.grad, state)
                else:
                    self._update(group, parameter, parameter.grad, state)
        return loss

    def _init_state(
        self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]
    ) -> None:
        raise AssertionError("defined by the subclass")

    def _update(
        self,
        group: dict[str, Any],
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        raise AssertionError("defined by the subclass")

    def _update_rows(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        """Updates the rows of a sparse gradient as a small dense parameter."""
        grad = gradient.coalesce()
        if grad._nnz() == 0:
            return
        rows = grad.indices()[0]
        part = {
            name: value[rows] if name != "step" else value
            for name, value in state.items()
        }
        weight = parameter[rows]
        self._update(group, weight, grad.values(), part)
        parameter[rows] = weight
        for name, value in part.items():
            if name != "step":
                state[name][rows] = value


class RowWiseAdagrad(_RowsOptimizer):
    r"""Adagrad with one accumulator per row instead of one per element.

    :math:`a_r \mathrel{+}= \mathrm{mean}(g_r^2)`,
    :math:`w_r \mathrel{-}= \mathrm{lr}_t\, g_r / (\sqrt{a_r} + \epsilon)`, with
    :math:`\mathrm{lr}_t = \mathrm{lr} / (1 + (t - 1)\,\mathrm{lr\_decay})`. A row is
    everything behind the first dimension; every element of a vector is a row of its
    own. State: ``rows`` floats instead of ``rows * dim``.

    Source: Gupta et al., "Training Highly Multiclass Classifiers", JMLR 2014, section
    4.2 (one learning rate per embedding vector).

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        lr_decay: decay of the learning rate over steps.
        weight_decay: L2 penalty, added to the gradient.
        initial_accumulator_value: start of the accumulators.
        eps: added to the root for numerical stability.

    Raises:
        ValueError: a value is negative.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        """See the class."""
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        for name, value in defaults.items():
            _check(value >= 0, f"RowWiseAdagrad: {name} must be >= 0, got {value}")
        super().__init__(params, defaults)

    def _init_state(
        self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]
    ) -> None:
        state["step"] = torch.tensor(0.0)
        rows = parameter.shape[0] if parameter.dim() else 1
        state["sum"] = torch.full(
            (rows,), group["initial_accumulator_value"], dtype=parameter.dtype
        )

    def _update(
        self,
        group: dict[str, Any],
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * weight
        by_row = grad.reshape(state["sum"].shape[0], -1)
        state["sum"] += by_row.square().mean(dim=1)
        rate = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
        root = state["sum"].sqrt().add_(group["eps"])
        shape = [-1] + [1] * (weight.dim() - 1) if weight.dim() else []
        weight.addcdiv_(grad, root.reshape(shape), value=-rate)


class FTRL(_RowsOptimizer):
    r"""FTRL-Proximal, the optimizer of sparse linear click models.

    Per coordinate, with :math:`p = -\mathrm{lr\_power}`:
    :math:`\sigma = ((n + g^2)^p - n^p) / \mathrm{lr}`, :math:`z \mathrel{+}= g - \sigma
    w`, :math:`n \mathrel{+}= g^2`, then :math:`w = 0` if :math:`|z| \le l_1`, else
    :math:`w = (\mathrm{sign}(z)\, l_1 - z) / ((\beta + n^p) / \mathrm{lr} + l_2)`. A
    coordinate that has never seen a gradient keeps its initial weight. State: two
    floats per element.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
    algorithm 1 (there ``lr`` is alpha and ``lr_power`` is -0.5).

    Args:
        params: parameters or parameter groups.
        lr: alpha of the paper.
        lr_power: exponent of the accumulator in the rate, at most 0.
        l1: strength of the L1 penalty, which makes weights exactly 0.
        l2: strength of the L2 penalty.
        beta: beta of the paper.
        initial_accumulator_value: start of ``n``.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        lr_power: float = -0.5,
        l1: float = 0.0,
        l2: float = 0.0,
        beta: float = 1.0,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        """See the class."""
        _check(lr > 0, f"FTRL: lr must be > 0, got {lr}")
        _check(lr_power <= 0, f"FTRL: lr_power must be <= 0, got {lr_power}")
        defaults = {
            "lr": lr,
            "lr_power": lr_power,
            "l1": l1,
            "l2": l2,
            "beta": beta,
            "initial_accumulator_value": initial_accumulator_value,
        }
        for name in ("l1", "l2", "beta", "initial_accumulator_value"):
            value = defaults[name]
            _check(value >= 0, f"FTRL: {name} must be >= 0, got {value}")
        super().__init__(params, defaults)

    def _init_state(
        self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]
    ) -> None:
        state["step"] = torch.tensor(0.0)
        state["z"] = torch.zeros_like(parameter)
        state["n"] = torch.full_like(parameter, group["initial_accumulator_value"])

    def _update(
        self,
        group: dict[str, Any],
        weight: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        power = -group["lr_power"]
        total = state["n"] + grad.square()
        after = total.pow(power)
        sigma = (after - state["n"].pow(power)) / group["lr"]
        state["z"] += grad - sigma * weight
        state["n"].copy_(total)
        z = state["z"]
        rate = (group["beta"] + after) / group["lr"] + group["l2"]
        solved = (z.sign() * group["l1"] - z) / rate
        solved = torch.where(z.abs() <= group["l1"], torch.zeros_like(z), solved)
        weight.copy_(torch.where(total == 0, weight, solved))
