# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tensors among a module's arguments that ids can be read from, wherever nested."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_cpudist.log import logger

Path = tuple[Hashable, ...]
Leaf = tuple[Path, torch.Tensor]

# What the core reads ids from, by the numbers that it knows.
ID_TYPES = {torch.int64: 0, torch.int32: 1, torch.float32: 2, torch.float64: 3}
# Deeper than any batch is nested, and more than any has columns.
_MAX_DEPTH = 4
_MAX_VALUES = 4096
_PLAIN = (int, float, str, bytes, type(None), torch.dtype, torch.device)


class _TooManyError(Exception):
    """More values than are worth looking at."""


class _Walk:
    """The readable tensors found so far, and how many values were looked at."""

    def __init__(self) -> None:
        self.found: list[Leaf] = []
        self._seen = 0

    def collect(self, value: Any, path: Path) -> None:
        self._seen += 1
        if self._seen > _MAX_VALUES:
            raise _TooManyError
        if isinstance(value, torch.Tensor):
            if readable(value):
                self.found.append((path, value))
        elif not isinstance(value, _PLAIN) and len(path) <= _MAX_DEPTH:
            for key, part in _parts(value):
                self.collect(part, (*path, key))


def readable(tensor: torch.Tensor) -> bool:
    """Whether ids can be read from the tensor's memory by those outside of torch."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.dtype in ID_TYPES
        and tensor.layout is torch.strided
        and tensor.is_cpu
    )


def leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """The readable tensors of a call, in an order that depends on its structure only.

    Looks into mappings, lists, tuples, dataclasses, keyed jagged tensors (whose keys
    have leaves of their own) and the attributes of other objects. Neither copies nor
    computes values.

    Returns:
        Path and tensor of each; nothing of a call with thousands of values.
    """
    walk = _Walk()
    try:
        for i, value in enumerate(args):
            walk.collect(value, (i,))
        for name, value in kwargs.items():
            walk.collect(value, (name,))
    except _TooManyError:
        return []
    except Exception as error:
        # Whatever an object of others raises when it is looked into: its lookups pull
        # by themselves.
        logger.debug("arguments of a forward are not looked into: %r", error)
        return []
    return walk.found


def signature(found: list[Leaf]) -> Hashable:
    """What two calls of the same structure have in common; sizes are not part of it."""
    return tuple((path, tensor.dtype, tensor.dim()) for path, tensor in found)


def _parts(value: Any) -> Iterator[tuple[Hashable, Any]]:
    if isinstance(value, (Mapping, list, tuple)) and len(value) > _MAX_VALUES:
        raise _TooManyError
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif isinstance(value, type) or callable(value):
        return
    elif _is_keyed_jagged(value):
        yield from _keyed(value)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)
    else:
        yield from getattr(value, "__dict__", {}).items()


def _is_keyed_jagged(value: Any) -> bool:
    """Whether it has values of several keys, one behind the other, as torchrec's."""
    kind = type(value)
    names = ("keys", "values", "offset_per_key")
    return all(callable(getattr(kind, name, None)) for name in names)


def _keyed(value: Any) -> Iterator[tuple[Hashable, Any]]:
    values, bounds = value.values(), value.offset_per_key()
    # Keys may repeat.
    for i, key in enumerate(value.keys()):
        yield (i, key), values[bounds[i] : bounds[i + 1]]
    yield "values", values
