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


@dataclass(frozen=True)
class ClipTensorNorm:
    """Scales the gradient of each parameter so that its 2-norm is at most ``max_norm``.

    Every table and dense parameter by its own norm, as one call of
    ``torch.nn.utils.clip_grad_norm_`` for each; duplicate rows are summed before. Under
    Sync, HalfAsync, AllReduce and Reduce the averaged gradient, whichever servers its
    parts are on, under Async each trainer's push, under Geo and LocalSGD the trainer's
    own gradient. Cost: under Sync and HalfAsync that of ``ClipNorm`` with 8 bytes per
    parameter and table in each of its messages, under Reduce one number per parameter
    among the trainers, else no messages.

    Attributes:
        max_norm: the largest 2-norm, > 0.
    """

    max_norm: float

    def __post_init__(self) -> None:
        """Checks the value."""
        _check_positive("ClipTensorNorm: max_norm", self.max_norm)


Clip = ClipNorm | ClipValue | ClipTensorNorm


def check_clip(clip: object) -> None:
    """Raises ``InvalidArgumentError`` for what is neither ``None`` nor a ``Clip``."""
    if clip is not None and not isinstance(clip, (ClipNorm, ClipValue, ClipTensorNorm)):
        raise InvalidArgumentError(
            "DistributedOptimizer: clip must be ClipNorm, ClipTensorNorm or ClipValue, "
            f"got {clip!r}"
        )


def scale_to(norm: float, max_norm: float) -> float:
    """What a gradient of this norm is multiplied by, as torch does; 1 to keep it.

    A norm that is no number gives one.
    """
    scale = max_norm / (norm + 1e-6)
    return 1.0 if scale >= 1.0 else scale
