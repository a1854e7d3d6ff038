# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a line of data holds: slots, and the schema that they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.settings.fields import nearest

Kind = Literal["sparse", "dense"]
Format = Literal["multislot", "criteo", "csv", "parquet"]
_DTYPES = {"sparse": (torch.int64,), "dense": (torch.float32, torch.int64)}
_MOST_VALUES = 2**20
_INT64 = (-(2**63), 2**63 - 1)


def known(word: object, words: Sequence[str]) -> str:
    """For "expected ...": one of some words, and the one that was meant, perhaps."""
    return f"one that is known; {nearest(str(word), words)}"


@dataclass(frozen=True)
class Slot:
    """One field of a record, and the entry of a batch that it becomes.

    A *sparse* slot is a bag of ids: in a batch ``Bags(values int64 [nnz], offsets int64
    [batch + 1])``, for ``nn.EmbeddingBag(include_last_offset=True)``; where every bag
    has one id, ``bags.ids`` is int64 ``[batch]``. A *dense* slot has ``dim`` numbers:
    ``[batch, dim]``.

    Attributes:
        name: its key in batches; no two slots of a schema share one.
        kind: ``"sparse"`` or ``"dense"``.
        dim: values per record. Dense: 1 by default. Sparse: any number by default,
            none included; a number is checked, and ``dim=1`` is what makes a missing
            id (an empty cell) a value, ``missing``, rather than an empty bag.
        dtype: sparse: ``torch.int64``. Dense: ``torch.float32``, the default, or
            ``torch.int64``, for class labels say.
        hash_range: sparse: values are hashed into ``[1, hash_range)``, 0 is for missing
            ones, so an embedding of ``hash_range`` rows fits. Equal values of different
            slots are hashed apart. MultiSlot and CSV hash the bytes of a value, so it
            need not be a number; Criteo hashes the number that the hex digits are.
            Default: the value is the id, a whole number of 64 bits with a sign.
        missing: what stands for an empty cell (Criteo, CSV, Parquet) of a slot of
            fixed dim; default 0.
        columns: CSV and Parquet: the columns its values come from, one per value;
            default: the one of its name. A sparse slot of any number has one, of ids
            between separators (CSV) or of lists (Parquet).
        used: False: its values are read over and are not in batches.
    """

    name: str
    kind: Kind = "sparse"
    dim: int | None = None
    dtype: torch.dtype | None = None
    hash_range: int | None = None
    missing: float = 0
    columns: Sequence[str] | None = None
    used: bool = True

    def __post_init__(self) -> None:
        """Checks the fields, and fills in what depends on the kind.

        Raises:
            InvalidArgumentError: names the field, what was found and what is valid.
        """
        if not isinstance(self.name, str) or not self.name:
            self._refuse("name", "a text that is not empty")
        if self.kind not in get_args(Kind):
            self._refuse("kind", known(self.kind, get_args(Kind)))
        sparse = self.kind == "sparse"
        dim = self.dim if sparse or self.dim is not None else 1
        if dim is not None and (type(dim) is not int or not 1 <= dim <= _MOST_VALUES):
            self._refuse("dim", f"a whole number from 1 to {_MOST_VALUES}")
        dtypes = _DTYPES[self.kind]
        dtype = self.dtype or dtypes[0]
        if dtype not in dtypes:
            self._refuse("dtype", " or ".join(map(str, dtypes)))
        if self.hash_range is not None and (
            not sparse
            or type(self.hash_range) is not int
            or not 2 <= self.hash_range <= _INT64[1]
        ):
            self._refuse("hash_range", "a whole number from 2 up, of a sparse slot")
        if dtype == torch.int64 and not (
            type(self.missing) is int and _INT64[0] <= self.missing <= _INT64[1]
        ):
            self._refuse("missing", "a whole number of 64 bits")
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "columns", self._checked_columns(dim))

    def _checked_columns(self, dim: int | None) -> tuple[str, ...]:
        if self.columns is None:
            return (self.name,)
        if isinstance(self.columns, str):
            self._refuse("columns", "a list of names")
        columns = tuple(self.columns)
        if len(columns) not in {1, dim or 1}:
            self._refuse("columns", f"{dim or 1} names, one per value")
        return columns

    def _refuse(self, field: str, expected: str) -> None:
        raise InvalidArgumentError(
            f"Slot({self.name!r}): {field}={getattr(self, field)!r}, expected "
            f"{expected}"
        )

    @property
    def integers(self) -> bool:
        """Whether its values are whole numbers of 64 bits."""
        return self.dtype == torch.int64

    def settings(self) -> dict[str, Any]:
        """What a saved position must agree with, as JSON can hold it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "dim": self.dim,
            "dtype": str(self.dtype),
            "hash_range": self.hash_range,
            "missing": self.missing,
            "columns": list(self.columns or ()),
            "used": self.used,
        }


def criteo_slots(hash_range: int | None = None) -> list[Slot]:
    """The slots of a Criteo file: a label, 13 numbers and 26 categorical values.

    In batches: ``label`` float32 ``[batch, 1]``, ``dense`` float32 ``[batch, 13]`` with
    0 for a missing number, and ``C1`` to ``C26`` of one id each.

    Args:
        hash_range: rows of each categorical table, ids are 1 to ``hash_range - 1`` and
            0 where the value is missing. Default: the 32 bits of the value as they are,
            and -1 where it is missing.
    """
    missing = -1 if hash_range is None else 0
    categories = [
        Slot(f"C{number}", dim=1, hash_range=hash_range, missing=missing)
        for number in range(1, 27)
    ]
    return [Slot("label", "dense"), Slot("dense", "dense", dim=13), *categories]


def checked_slots(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """The slots of a schema as a tuple.

    Raises:
        InvalidArgumentError: none, none used, or two of one name.
    """
    made = tuple(slots)
    for slot in made:
        if not isinstance(slot, Slot):
            raise InvalidArgumentError(
                f"slots: expected Slot objects, found {type(slot).__name__}"
            )
    if not any(slot.used for slot in made):
        raise InvalidArgumentError("slots: expected at least one that is used")
    names = [slot.name for slot in made]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(f"slots: {twice} more than once")
    return made
