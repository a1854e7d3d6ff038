# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a replica's loss is, and what its backward begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError

SCALES = ("mean", "equal", "sum", "custom")


def loss_of(returned: Any) -> torch.Tensor:
    """The loss in what ``loss_fn`` returned.

    Raises:
        InvalidArgumentError: there is none.
    """
    found = returned
    if isinstance(returned, (tuple, list)) and returned:
        found = returned[0]
    elif isinstance(returned, Mapping):
        found = returned.get("loss")
    if not isinstance(found, torch.Tensor):
        raise InvalidArgumentError(
            f"loss_fn returned {type(returned).__name__} without a loss. Return the "
            'loss, a tuple that begins with it, or a dict that has it as "loss".'
        )
    return found


def backward(loss: torch.Tensor, seed: Any) -> None:
    """Backward from a loss, beginning with ``seed``."""
    if not isinstance(seed, torch.Tensor):
        if loss.numel() != 1:
            raise InvalidArgumentError(
                f"the loss has shape {tuple(loss.shape)}, expected one number. Take "
                'its mean, or pass a loss_gradient with gradient_scale="custom".'
            )
        seed = torch.full_like(loss, seed)
    torch.autograd.backward(loss, seed)


def backward_seeds(
    scale: str, counts: Sequence[int], parts: int, given: Any
) -> list[Any]:
    """What each replica's backward begins with.

    Args:
        scale: the gradient scale.
        counts: samples of each part.
        parts: how many there are.
        given: the loss gradient that ``run`` was given.

    Raises:
        InvalidArgumentError: it is missing, or not asked for, or cannot be cut.
    """
    if (scale == "custom") != (given is not None):
        raise InvalidArgumentError(
            f'run: gradient_scale="custom" and loss_gradient= belong together; found '
            f"gradient_scale={scale!r} and loss_gradient={type(given).__name__}."
        )
    if scale == "mean":
        total = max(sum(counts), 1)
        return [count / total for count in counts]
    if scale == "custom":
        return _cut_gradient(given, parts)
    return [1.0 / parts if scale == "equal" else 1.0] * parts


def _cut_gradient(given: Any, parts: int) -> list[Any]:
    if isinstance(given, (tuple, list)):
        if len(given) != parts:
            raise InvalidArgumentError(
                f"run: loss_gradient has {len(given)} entries for {parts} replicas."
            )
        return list(given)
    if isinstance(given, torch.Tensor) and given.dim() > 0:
        if len(given) < parts:
            raise InvalidArgumentError(
                f"run: loss_gradient of {len(given)} samples for {parts} replicas."
            )
        step = len(given) // parts
        ends = [*range(step, parts * step, step), len(given)]
        return [given[b:e] for b, e in zip([0, *ends], ends, strict=False)]
    if isinstance(given, (int, float, torch.Tensor)):
        return [float(given)] * parts
    raise InvalidArgumentError(
        "run: loss_gradient must be a number, a tensor, or a list with one per "
        f"replica; found {type(given).__name__}."
    )


def call_model(model: nn.Module, part: Any) -> Any:
    """Calls a model with a part of a batch as its arguments."""
    if isinstance(part, Mapping):
        return model(**part)
    if isinstance(part, (tuple, list)):
        return model(*part)
    return model(part)


def signature(name: str, training: bool, parts: Sequence[Any]) -> Any:
    """What compiled code depends on besides the model: forms, types and modes."""

    def form(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), value.stride()
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape
        if isinstance(value, Mapping):
            return tuple((key, form(item)) for key, item in value.items())
        if isinstance(value, (tuple, list)):
            return tuple(form(item) for item in value)
        return type(value), value

    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )
    return name, training, modes, tuple(form(part) for part in parts)
