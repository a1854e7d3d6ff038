# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a batch of the readers consists of, and how many samples it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_cpudist.errors import InvalidArgumentError

# What is the same for all samples.
_COMMON = (str, bytes, bool, int, float, complex, type(None), np.generic)


class Bags(NamedTuple):
    """Ids of a sparse slot: a bag of any number of them for each sample.

    ``nn.EmbeddingBag(..., include_last_offset=True)(*bags)`` looks them up. It is a
    tuple of two, so that ``len()`` is 2; ``size`` counts the bags.

    Attributes:
        values: int64 ``[nnz]``, those of the first bag first.
        offsets: int64 ``[size + 1]``, ascending from 0 to nnz: where each bag begins,
            and the end.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    @property
    def size(self) -> int:
        """How many bags there are."""
        return self.offsets.shape[0] - 1

    @property
    def ids(self) -> torch.Tensor:
        """The values ``[size]`` of bags of one id each, for ``nn.Embedding``. A view.

        Raises:
            InvalidArgumentError: a bag has none, or several.
        """
        counts = self.offsets.diff()
        if bool((counts != 1).any()):
            where = int((counts != 1).int().argmax())
            raise InvalidArgumentError(
                f"Bags.ids: expected one id for each sample, but sample {where} has "
                f"{int(counts[where])}. Look bags up with nn.EmbeddingBag("
                "include_last_offset=True)(*bags)."
            )
        return self.values

    def rows(self, begin: int, end: int) -> Bags:
        """The bags ``begin`` to ``end``; values are a view, offsets are new.

        Raises:
            InvalidArgumentError: there are no such bags.
        """
        if not 0 <= begin <= end <= self.size:
            raise InvalidArgumentError(
                f"Bags.rows({begin}, {end}): there are {self.size} bags."
            )
        offsets = self.offsets[begin : end + 1]
        first = int(offsets[0])
        return Bags(self.values[first : int(offsets[-1])], offsets - first)

    @staticmethod
    def join(parts: list[Bags]) -> Bags:
        """All bags of several, in their order."""
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part.values))
        shifted = [p.offsets[:-1] + e for p, e in zip(parts, ends, strict=False)]
        last = parts[-1].offsets.new_tensor([ends[-1]])
        values = torch.cat([part.values for part in parts])
        return Bags(values, torch.cat([*shifted, last]))


class SingleBags(Bags):
    """Bags of one id each, by their schema: ``ids`` need not look."""

    __slots__ = ()

    @property
    def ids(self) -> torch.Tensor:
        """The values ``[size]``, for ``nn.Embedding``. A view."""
        return self.values


def sizes(batch: Any) -> set[int]:
    """The numbers of samples that the tensors, arrays and bags of a batch have.

    Raises:
        InvalidArgumentError: there is something else than these, numbers and texts.
    """
    if isinstance(batch, Bags):
        return {batch.size}
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return {int(batch.shape[0])} if batch.ndim else set()
    if isinstance(batch, Mapping):
        return set().union(*(sizes(item) for item in batch.values()))
    if isinstance(batch, (tuple, list)):
        return set().union(*(sizes(item) for item in batch))
    if isinstance(batch, _COMMON):
        return set()
    raise InvalidArgumentError(
        "a batch may have tensors, arrays, Bags, numbers and texts, in tuples, lists "
        f"and dicts; found {type(batch).__name__}."
    )


def batch_size(batch: Any) -> int:
    """The samples of a batch: the common dim 0 of its tensors and number of its bags.

    Args:
        batch: tensors and arrays ``[samples, ...]`` and ``Bags`` in tuples, lists and
            dicts, nested. Tensors without dimensions, numbers and texts do not count.

    Raises:
        InvalidArgumentError: there is no such number, or something else in the batch.
    """
    found = sizes(batch)
    if len(found) != 1:
        raise InvalidArgumentError(
            f"the tensors of a batch have {sorted(found)} samples (their dim 0), "
            "expected one number for all. Pass values and offsets as "
            "cpudist.data.Bags(values, offsets), and what is no sample as a tensor "
            "without dimensions."
        )
    return found.pop()
