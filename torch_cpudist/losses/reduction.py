# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the losses have in common: their checks, and how samples become one value."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torch_cpudist.errors import InvalidArgumentError

REDUCTIONS = ("mean", "sum", "none")


def check_shape(what: str, tensor: torch.Tensor, *shape: int) -> None:
    """Refuses a tensor of another shape; -1 is any length.

    Raises:
        InvalidArgumentError: it has another shape.
    """
    found = tuple(tensor.shape)
    same = len(found) == len(shape) and all(
        wanted in (-1, length) for wanted, length in zip(shape, found, strict=True)
    )
    if not same:
        wanted = ", ".join("any" if n < 0 else str(n) for n in shape)
        raise InvalidArgumentError(
            f"{what}: expected a tensor of shape [{wanted}], got {list(found)}"
        )


def check_ids(what: str, ids: torch.Tensor, length: int) -> torch.Tensor:
    """The ids as int64.

    Raises:
        InvalidArgumentError: they are no whole numbers, or not so many.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise InvalidArgumentError(f"{what}: expected int64 ids, got {ids.dtype}")
    check_shape(what, ids, length)
    return ids.long()


def scores(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """All products ``[queries, rows]``, in float32 at least, also under autocast.

    A score in bfloat16 is off by more than what a temperature of 0.05 tells apart.
    """
    wide = torch.promote_types(
        torch.promote_types(queries.dtype, rows.dtype), torch.float32
    )
    with torch.autocast(queries.device.type, enabled=False):
        return queries.to(wide) @ rows.to(wide).T


def reduced(
    what: str,
    logits: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor | None,
    reduction: str,
) -> torch.Tensor:
    """-log softmax(logits) at a place of each row, times its weight, as one value.

    Args:
        what: the loss, for errors.
        logits: ``[samples, classes]``.
        places: int64 ``[samples]``, the class of each.
        weights: ``[samples]``; ``None``: 1 each.
        reduction: ``"mean"``, over the number of samples, ``"sum"`` or ``"none"``.

    Raises:
        InvalidArgumentError: on an unknown reduction, or weights of another shape.
    """
    if reduction not in REDUCTIONS:
        raise InvalidArgumentError(
            f"{what}: reduction must be one of {', '.join(REDUCTIONS)}, got "
            f"{reduction!r}"
        )
    losses = F.cross_entropy(logits, places, reduction="none")
    if weights is not None:
        check_shape(f"{what}: weights", weights, len(losses))
        losses = losses * weights.to(losses.dtype)
    if reduction == "none":
        return losses
    total = losses.sum()
    # A batch without samples has the loss 0, and gradients of 0.
    return total / max(len(losses), 1) if reduction == "mean" else total
