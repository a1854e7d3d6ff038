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
    if isinstance(group["lr"], torch.Tensor):
        return False
    for parameter in group["params"]:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse or not parameter.is_cpu or grad.dtype != parameter.dtype:
            return False
        step = inner.state[parameter].get("step") if parameter in inner.state else None
        if step is not None and not (
            isinstance(step, torch.Tensor) and step.dtype == torch.float32
        ):
            return False
    return True
