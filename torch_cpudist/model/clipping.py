# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Clipping a trainer's own gradients, sparse ones included."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from torch_cpudist import ops
from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.settings.clip import (
    Clip,
    ClipNorm,
    ClipTensorNorm,
    ClipValue,
    scale_to,
)


@torch.no_grad()
def clip_own(clip: Clip | None, parameters: list[torch.Tensor]) -> None:
    """Clips this trainer's own gradients in place, before it steps by itself."""
    if isinstance(clip, ClipNorm):
        clip_grad_norm_(parameters, clip.max_norm)
    elif isinstance(clip, ClipTensorNorm):
        scales = [tensor_scale(clip, parameter.grad) for parameter in parameters]
        # As in _scale: a buffer may be the values of several sparse gradients.
        for parameter, scale in zip(parameters, scales, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse and scale != 1.0:
                parameter.grad = parameter.grad * scale
        for parameter, scale in zip(parameters, scales, strict=True):
            grad = parameter.grad
            if grad is not None and not grad.is_sparse and scale != 1.0:
                grad.mul_(scale)
    elif isinstance(clip, ClipValue):
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and grad.is_sparse:
                values = grad._values().contiguous()
                keys, sums = ops.dedupe_segment_sum(grad._indices()[0], values)
                parameter.grad = torch.sparse_coo_tensor(
                    keys[None],
                    sums.clamp_(-clip.value, clip.value),
                    grad.shape,
                    check_invariants=False,
                )
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.clamp_(-clip.value, clip.value)


def tensor_scale(clip: ClipTensorNorm, grad: torch.Tensor | None) -> float:
    """What the gradient of one parameter, of any layout, is multiplied by."""
    if grad is None:
        return 1.0
    return scale_to(math.sqrt(_squared_norm(grad)), clip.max_norm)


def _squared_norm(grad: torch.Tensor) -> float:
    if grad.is_sparse:
        if grad.is_coalesced():
            grad = grad.values()
        elif grad.sparse_dim() == 1 and grad.dense_dim() == 1:
            values = grad._values().contiguous()
            grad = ops.dedupe_segment_sum(grad._indices()[0], values)[1]
        else:
            grad = grad.coalesce().values()
    return float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2


def _scale(parameters: list[torch.Tensor], scale: float) -> None:
    # Autograd leaves one buffer as the values of several sparse gradients (two tables
    # whose lookups are added, say). So those are replaced, and before any strided one
    # changes in place.
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad * scale
    for parameter in parameters:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad.mul_(scale)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clips this trainer's own gradient to a 2-norm, sparse gradients included.

    As ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients: the norm is
    that of all gradients together, duplicates of a sparse row summed first; gradients
    are scaled by ``max_norm / (norm + 1e-6)`` if that is below 1, strided ones in
    place; a sparse ``grad`` is replaced, since autograd may share its values between
    parameters. To clip the *averaged* gradient use
    ``DistributedOptimizer(clip=ClipNorm(...))``. Local: no messages.

    Args:
        parameters: parameters whose ``grad`` is clipped; those without one are skipped.
        max_norm: largest norm, >= 0.
        norm_type: 2, the only norm there is here; stands where torch has it.
        error_if_nonfinite: raise if the norm is infinite or no number; otherwise such a
            norm makes gradients no numbers, as in torch.

    Returns:
        float64 scalar: the norm before clipping.

    Raises:
        InvalidArgumentError: ``max_norm`` is negative or no number, ``norm_type`` is
            not 2.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; no
            gradient was changed.
    """
    if not max_norm >= 0:
        raise InvalidArgumentError(
            f"clip_grad_norm_: max_norm must be >= 0, got {max_norm}"
        )
    if isinstance(norm_type, bool) or float(norm_type) != 2.0:
        raise InvalidArgumentError(
            f"clip_grad_norm_: norm_type must be 2, got {norm_type!r}; sparse "
            "gradients have no other norm here. error_if_nonfinite goes by keyword."
        )
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    else:
        parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(_squared_norm(grad) for grad in grads))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {norm}, expected a finite "
            "one. Look for a loss that is infinite or no number."
        )
    scale = float(max_norm) / (norm + 1e-6)
    if not scale >= 1.0:
        _scale(parameters, scale)
    return torch.tensor(norm, dtype=torch.float64)
