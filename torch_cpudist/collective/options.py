# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options of wrapped optimizers as text, which is made when they change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

# Options whose text is their value; of others it is the name of their class.
_PLAIN = (bool, int, float, str, tuple, list, type(None))
_NOT_OPTIONS = ("params", "param_names")


class _Seen:
    """An option as it was when its text was made."""

    def __init__(self, value: Any, inside: bool = False) -> None:
        """Remembers ``value``; ``inside``: of a tuple or list."""
        self._kind = type(value)
        self._inside = inside
        self._kept: Any = value
        if isinstance(value, torch.Tensor):
            self._kept = _content(value)
        elif isinstance(value, (tuple, list)):
            self._kept = [_Seen(item, inside=True) for item in value]

    def is_still(self, value: Any) -> bool:
        """Whether the text of ``value`` is surely the same. Makes no text."""
        if type(value) is not self._kind:
            return False
        if isinstance(value, torch.Tensor):
            return bool(_content(value) == self._kept)
        if isinstance(value, (tuple, list)):
            return len(value) == len(self._kept) and all(
                seen.is_still(item)
                for seen, item in zip(self._kept, value, strict=True)
            )
        if self._kind is float:
            # Of equal numbers only zeros have two texts.
            same_sign = math.copysign(1.0, value) == math.copysign(1.0, self._kept)
            return bool(value == self._kept) and same_sign
        if self._kind in (bool, int, str):
            return bool(value == self._kept)
        if isinstance(value, _PLAIN):
            return value is self._kept
        return not self._inside


def _content(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


class Options:
    """Options of every group of every optimizer. Not thread-safe."""

    def __init__(self, inners: Sequence[Optimizer]) -> None:
        """Of ``inners``."""
        self._inners = list(inners)
        self._seen: list[dict[str, _Seen]] | None = None
        self._lines: list[str] = []

    def _groups(self) -> list[dict[str, Any]]:
        return [group for inner in self._inners for group in inner.param_groups]

    def _are_still(self, groups: Sequence[dict[str, Any]]) -> bool:
        if self._seen is None or len(self._seen) != len(groups):
            return False
        for group, seen in zip(groups, self._seen, strict=True):
            named = sum(name in group for name in _NOT_OPTIONS)
            if len(group) - named != len(seen):
                return False
            if not all(
                name in group and one.is_still(group[name])
                for name, one in seen.items()
            ):
                return False
        return True

    def lines(self) -> list[str]:
        """One line per option; the same list again until one changes.

        Cost where none has: a look at each, and a copy of those that are tensors.
        """
        groups = self._groups()
        if not self._are_still(groups):
            self._lines = [
                f"{type(inner).__name__}.param_groups[{g}][{name!r}] = {_text(value)}"
                for inner in self._inners
                for g, group in enumerate(inner.param_groups)
                for name, value in sorted(group.items())
                if name not in _NOT_OPTIONS
            ]
            self._seen = [
                {n: _Seen(v) for n, v in group.items() if n not in _NOT_OPTIONS}
                for group in groups
            ]
        return self._lines
