# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Cutting a batch into the parts of replicas, and joining what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torch_cpudist.errors import BatchTooSmallError, InvalidArgumentError
from torch_cpudist.model import bags
from torch_cpudist.model.bags import Bags


def _rebuilt(old: Any, parts: Sequence[Any]) -> Any:
    """A sequence like ``old`` of other items."""
    if isinstance(old, tuple) and hasattr(old, "_fields"):
        return type(old)(*parts)
    return type(old)(parts)


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Applies ``leaf`` to everything in tuples, lists and dicts; to bags as a whole."""
    if isinstance(value, Bags):
        return leaf(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, leaf) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return _rebuilt(value, [_mapped(item, leaf) for item in value])
    return leaf(value)


def sample_count(batch: Any) -> int:
    """The samples of a batch: the common length of its tensors and bags.

    Raises:
        InvalidArgumentError: they have none in common, or there is something else.
    """
    try:
        return bags.batch_size(batch)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"run: {error} Or cut the batch yourself and pass a part per replica to "
            "run_parts()."
        ) from None


def split(batch: Any, count: int) -> list[Any]:
    """Cuts a batch along dim 0 into ``count`` parts; the last takes the remainder.

    Tensors, arrays and values of bags are views of the batch's; what has no dimensions,
    numbers and texts go to every part.

    Raises:
        BatchTooSmallError: there are fewer samples than parts.
        InvalidArgumentError: see ``sample_count``.
    """
    samples = sample_count(batch)
    if samples < count:
        raise BatchTooSmallError(
            f"run: a batch of {samples} samples cannot be split over {count} replicas. "
            f"Set CPU_NUM={max(samples, 1)} or less, pass replicas=, or make batches "
            f"of at least {count} samples (DataLoader: drop_last=True)."
        )
    step = samples // count

    def cut(part: int) -> Any:
        begin = part * step
        end = samples if part == count - 1 else begin + step

        def leaf(value: Any) -> Any:
            if isinstance(value, Bags):
                return value.rows(begin, end)
            sliced = isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0
            return value[begin:end] if sliced else value

        return _mapped(batch, leaf)

    return [cut(part) for part in range(count)]


def join(parts: Sequence[Any]) -> Any:
    """Joins results along dim 0, in the order of replicas.

    Tensors without dimensions are stacked; what is no tensor is taken from the first.

    Raises:
        InvalidArgumentError: there are no parts.
    """
    if not parts:
        raise InvalidArgumentError("join: expected a result per replica, found none.")
    first = parts[0]
    if isinstance(first, torch.Tensor):
        joined = torch.cat if first.ndim else torch.stack
        return joined(list(parts))
    if isinstance(first, Bags):
        return Bags.join(list(parts))
    if isinstance(first, Mapping):
        return {key: join([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [join(list(items)) for items in zip(*parts, strict=True)]
        return _rebuilt(first, items)
    return first


def detached(value: Any) -> Any:
    """The same without autograd's graph."""

    def leaf(found: Any) -> Any:
        if isinstance(found, Bags):
            return Bags(found.values.detach(), found.offsets.detach())
        return found.detach() if isinstance(found, torch.Tensor) else found

    return _mapped(value, leaf)
