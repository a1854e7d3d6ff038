# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch's optimizers with their fused kernels, where a script leaves the choice open.

One pass over memory in the place of one per operation. The result is that of torch's
``fused=True``, bit for bit, and differs from the default by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_HAVE_KERNELS = (SGD, Adagrad, Adam, AdamW)


@contextmanager
def fused(inners: Sequence[Optimizer]) -> Iterator[None]:
    """While it is entered, groups that may use fused kernels do. No messages.

    Those of exactly torch's SGD, Adagrad, Adam and AdamW whose ``fused`` and
    ``foreach`` are ``None``. A script that wants torch's own choice says
    ``fused=False``.
    """
    chosen = [
        group
        for inner in inners
        if type(inner) in _HAVE_KERNELS
        for group in inner.param_groups
        if _leaves_open(group) and _fits(inner, group)
    ]
    try:
        for group in chosen:
            group["fused"] = True
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def _leaves_open(group: dict[str, Any]) -> bool:
    undecided = all(group.get(name, False) is None for name in ("fused", "foreach"))
    return undecided and not (group.get("capturable") or group.get("differentiable"))


def _fits(inner: Optimizer, group: dict[str, Any]) -> bool:
    """Whether torch's fused kernels take these parameters and what they have."""
    return all(_takes(inner, group, parameter) for parameter in group["params"])


def _takes(inner: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> bool:
    if any(isinstance(v, torch.Tensor) for v in (group["lr"], *group.get("betas", ()))):
        return False
    grad = parameter.grad
    if grad is None:
        return True
    if grad.is_sparse or not parameter.is_cpu or grad.dtype != parameter.dtype:
        return False
    state = inner.state[parameter] if parameter in inner.state else {}
    if group.get("momentum") and state.get("momentum_buffer") is None:
        return False  # they take all buffers of a group or none; a first step makes it
    if not parameter.is_floating_point():
        return False
    kept = [v for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step"]
    return all(_elements_alike(parameter, other) for other in [grad, *kept])


def _elements_alike(parameter: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether memory holds the same elements in the same order, without holes.

    The kernels go over memory and do not look at strides.
    """
    if parameter.is_contiguous():
        return other.is_contiguous()
    ordered = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, size in ordered:
        if size > 1 and stride != expected:
            return False
        expected *= size
    return other.stride() == parameter.stride()


def step_fused(part: Optimizer) -> None:
    """Steps an optimizer of parts of a model, each by the fused kernel that takes it.

    Which parameters an optimizer has beside one changes nothing for that one.

    Args:
        part: of exactly torch's class, or of any other, which steps as it does. Its
            groups are cut by what the kernels take, and stay so.
    """
    if type(part) in _HAVE_KERNELS:
        part.param_groups = [
            cut for group in part.param_groups for cut in _cut(part, group)
        ]
    part.step()


def _cut(part: Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
    if not _leaves_open(group):
        return [group]
    taken: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    for parameter in group["params"]:
        (taken if _takes(part, group, parameter) else rest).append(parameter)
    return [{**group, "params": taken, "fused": True}, {**group, "params": rest}]
