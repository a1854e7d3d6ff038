# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of the model's file, whose bytes are made when they are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_cpudist.errors import SnapshotError
from torch_cpudist.exports.encoding import DTYPES, narrow
from torch_cpudist.exports.pieces import bytes_of
from torch_cpudist.exports.reading import SCALE
from torch_cpudist.snapshot.checked_json import Malformed
from torch_cpudist.snapshot.trees import Leaf, pack


@dataclass(frozen=True)
class Stored:
    """A tensor of the model's file; ``contents`` makes its bytes when they are due."""

    dtype: str
    shape: tuple[int, ...]
    contents: Callable[[], memoryview]


def as_it_is(name: str, tensor: torch.Tensor) -> Stored:
    """A tensor in its own dtype.

    Raises:
        SnapshotError: no file can have one of its kind.
    """

    def leaf(of: torch.Tensor) -> Leaf:
        try:
            (found,) = pack(of).leaves.values()
        except (Malformed, SnapshotError, ValueError) as error:
            raise SnapshotError(f"export: {name!r}: {error}") from error
        return found

    plain = tensor.layout == torch.strided and not tensor.is_quantized
    # Of a plain one nothing is copied before its turn.
    sample = torch.empty(0, dtype=tensor.dtype) if plain else tensor.detach()
    dtype = leaf(sample).dtype
    shape = tuple(tensor.shape)
    return Stored(dtype, shape, lambda: leaf(tensor.detach()).contents.data)


def narrowed(name: str, tensor: torch.Tensor, dtype: str) -> dict[str, Stored]:
    """Rows of a table as they are kept."""
    rows = tensor.detach()

    def weight() -> memoryview:
        return bytes_of(narrow(rows.cpu().numpy(), dtype)["weight"])

    def scale() -> memoryview:
        return bytes_of(narrow(rows.cpu().numpy(), dtype)["scale"])

    found = {name: Stored(DTYPES[dtype], tuple(rows.shape), weight)}
    if dtype == "int8":
        found[name + SCALE] = Stored("F32", (len(rows),), scale)
    return found
