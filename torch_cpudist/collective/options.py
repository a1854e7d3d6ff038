# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options of wrapped optimizers as text, which is made when they change."""

from __future__ import annotations

import math
import operator
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


def _may_change(value: Any) -> bool:
    """Whether the text of an object can become another one."""
    if type(value) is tuple:
        return any(map(_may_change, value))
    return not isinstance(value, (bool, int, float, str, type(None)))


class Options:
    """Options of every group of every optimizer. Not thread-safe."""

    def __init__(self, inners: Sequence[Optimizer]) -> None:
        """Of ``inners``."""
        self._inners = list(inners)
        self._lines: list[str] = []
        # Of each group, its options as they were when the text was made.
        self._seen: list[dict[str, _Seen]] | None = None
        # Of each group, its names and values themselves; those values that may change.
        self._objects: list[tuple[list[str], list[Any]]] = []
        self._changing: list[tuple[Any, _Seen]] = []

    def lines(self) -> list[str]:
        """One line per option; the same list again until one changes.

        Cost where none has: a look at each, and a copy of those that are tensors.
        """
        groups = [group for inner in self._inners for group in inner.param_groups]
        if self._seen is None or not self._are_same(groups):
            if self._seen is None or not self._are_still(groups, self._seen):
                self._lines = self._made()
            self._seen = [
                {n: _Seen(v) for n, v in group.items() if n not in _NOT_OPTIONS}
                for group in groups
            ]
            self._objects = [(list(group), list(group.values())) for group in groups]
            self._changing = [
                (group[name], one)
                for group, seen in zip(groups, self._seen, strict=True)
                for name, one in seen.items()
                if _may_change(group[name])
            ]
        return self._lines

    def _are_same(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether the groups have the same objects, and none has changed itself."""
        return (
            len(groups) == len(self._objects)
            and all(
                list(group) == names and all(map(operator.is_, group.values(), values))
                for group, (names, values) in zip(groups, self._objects, strict=True)
            )
            and all(seen.is_still(value) for value, seen in self._changing)
        )

    def _are_still(
        self, groups: Sequence[dict[str, Any]], kept: Sequence[dict[str, _Seen]]
    ) -> bool:
        """Whether the groups have equal options, perhaps in other objects."""
        if len(kept) != len(groups):
            return False
        for group, seen in zip(groups, kept, strict=True):
            named = sum(name in group for name in _NOT_OPTIONS)
            if len(group) - named != len(seen):
                return False
            if not all(
                name in group and one.is_still(group[name])
                for name, one in seen.items()
            ):
                return False
        return True

    def _made(self) -> list[str]:
        return [
            f"{type(inner).__name__}.param_groups[{g}][{name!r}] = {_text(value)}"
            for inner in self._inners
            for g, group in enumerate(inner.param_groups)
            for name, value in sorted(group.items())
            if name not in _NOT_OPTIONS
        ]
