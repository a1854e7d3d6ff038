# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How gradients are clipped: the averaged one on servers, or a trainer's own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_cpudist.errors import InvalidArgumentError


def _check_positive(what: str, value: object) -> None:
    try:
        positive = math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]
    except TypeError:
        positive = False
    if not positive:
        raise InvalidArgumentError(f"{what} must be finite and > 0, got {value!r}")


@dataclass(frozen=True)
class ClipNorm:
    """Scales the averaged gradient so that its global 2-norm is at most ``max_norm``.

    The norm is taken over all tables and dense parameters of the optimizer, as
    ``torch.nn.utils.clip_grad_norm_`` takes it over the joined batch's gradient. Cost:
    one more small message to and from every server per step. Under Async each trainer's
    own gradient is scaled, before it is sent, at no cost in messages.

    Attributes:
        max_norm: the largest 2-norm, > 0.
    """

    max_norm: float

    def __post_init__(self) -> None:
        """Checks the value."""
        _check_positive("ClipNorm: max_norm", self.max_norm)


@dataclass(frozen=True)
class ClipValue:
    """Clamps every element of the averaged gradient to ``[-value, value]``.

    Under Async those of each trainer's own gradient.

    Attributes:
        value: the largest magnitude, > 0.
    """

    value: float

    def __post_init__(self) -> None:
        """Checks the value."""
        _check_positive("ClipValue: value", self.value)


Clip = ClipNorm | ClipValue


def check_clip(clip: object) -> None:
    """Raises ``InvalidArgumentError`` for what is neither ``None`` nor a ``Clip``."""
    if clip is not None and not isinstance(clip, (ClipNorm, ClipValue)):
        raise InvalidArgumentError(
            f"DistributedOptimizer: clip must be ClipNorm or ClipValue, got {clip!r}"
        )
