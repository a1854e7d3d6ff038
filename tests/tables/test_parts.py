# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which part of an input ids are, and which one they are of every input."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torch_cpudist.tables import inputs
from torch_cpudist.tables.parts import find, meet_all


def matrix(rows: int, columns: int = 5) -> torch.Tensor:
    return torch.arange(rows * columns).view(rows, columns) * 3 % 1000


def boxes(ids: Any, *tensors: torch.Tensor) -> list[tuple[int, list[slice]]]:
    """The likeliest ranges of every part that was found."""
    return [
        (part.leaf, [slice(*ranges[0]) for ranges in part.ranges])
        for part in find(ids, tensors)
    ]


VIEWS = {
    "column": (lambda x: x[:, 3], 3, 4),
    "columns": (lambda x: x[:, 1:4], 1, 4),
    "one column": (lambda x: x[:, 2:3], 2, 3),
    "flattened column": (lambda x: x[:, 4:5].reshape(-1), 4, 5),
    "transposed": (lambda x: x.t()[1:3], 1, 3),
    "unsqueezed": (lambda x: x[:, 0].unsqueeze(1), 0, 1),
    "expanded": (lambda x: x[:, 2].unsqueeze(1).expand(-1, 7), 2, 3),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_says_by_its_strides(view: str) -> None:
    make, begin, end = VIEWS[view]
    for rows in (1, 2, 6):
        x = matrix(rows)
        ((leaf, ranges),) = boxes(make(x), matrix(9) + 7, x)
        assert leaf == 1
        assert torch.equal(x[tuple(ranges)], x[:, begin:end])


@pytest.mark.parametrize("kind", [torch.int32, torch.float32, torch.float64])
@pytest.mark.parametrize("view", ["column", "columns", "one column"])
def test_a_cast_says_by_its_values(kind: torch.dtype, view: str) -> None:
    make, begin, end = VIEWS[view]
    x = matrix(6).to(kind)
    found = boxes(make(x).long(), x)
    assert [x[tuple(ranges)].tolist() for _, ranges in found] == [
        x[:, begin:end].tolist()
    ]


def test_columns_of_equal_values_are_told_apart_later() -> None:
    same = torch.zeros(3, 4)
    first = find(same[:, 2].long(), [same])
    assert len(first) == 4
    x = matrix(6, 4).float()
    (part,) = meet_all(first, find(x[:, 2].long(), [x]))
    assert slice(*part.ranges[1][0]) == slice(2, 3)


def test_sizes_tell_which_end_a_range_counts_from() -> None:
    def seen(make: Any) -> Any:
        parts = None
        for width in (6, 9):
            x = matrix(4, width)
            found = find(make(x), [x])
            parts = found if parts is None else meet_all(parts, found)
        assert parts is not None
        return [slice(*part.ranges[1][0]) for part in parts]

    assert seen(lambda x: x[:, 1:]) == [slice(1, None)]
    assert seen(lambda x: x[:, :-1]) == [slice(0, -1)]
    assert seen(lambda x: x[:, :6]) == [slice(0, 6)]
    assert seen(lambda x: x[:, -3:]) == [slice(-3, None)]
    assert seen(lambda x: x[:, x.shape[1] // 3 : x.shape[1] // 2]) == []


def test_what_is_no_part() -> None:
    x = matrix(6)
    others = (x + 1, x[:, 1:3] * 2, x.view(-1)[3:9], x[::2], torch.empty(0).long())
    for ids in others:
        assert boxes(ids, x) == []
    fractions = torch.tensor([[0.5, float("nan")], [2.5, float("inf")]])
    ((_, ranges),) = boxes(torch.tensor([0, 2]), fractions)
    assert ranges[1] == slice(0, 1)


# -- inputs ----------------------------------------------------------------------------


class Keyed:
    """As torchrec's KeyedJaggedTensor."""

    def __init__(self, lengths: list[int]) -> None:
        self._values = torch.arange(sum(lengths))
        self._offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def keys(self) -> list[str]:
        return ["a", "b"]

    def values(self) -> torch.Tensor:
        return self._values

    def offset_per_key(self) -> list[int]:
        return self._offsets


@dataclass
class Batch:
    keyed: Keyed
    others: Any


class Loose:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.name = tensor, "no tensor"


def test_tensors_are_found_wherever_they_are() -> None:
    x = torch.arange(3)
    batch = Batch(Keyed([2, 3]), OrderedDict(x=[x, (x.int(), 7)], y=Loose(x.float())))
    found = inputs.leaves((batch, x.half()), {"more": x.double()})
    assert [(path, tensor.tolist()) for path, tensor in found] == [
        ((0, "keyed", (0, "a")), [0, 1]),
        ((0, "keyed", (1, "b")), [2, 3, 4]),
        ((0, "keyed", "values"), [0, 1, 2, 3, 4]),
        ((0, "others", "x", 0), [0, 1, 2]),
        ((0, "others", "x", 1, 0), [0, 1, 2]),
        ((0, "others", "y", "tensor"), [0, 1, 2]),
        (("more",), [0, 1, 2]),
    ]
    again = Batch(Keyed([0, 1]), OrderedDict(x=[x[:1], (x.int(), 8)], y=Loose(x / 2)))
    others = inputs.leaves((again,), {"more": x.double()})
    assert inputs.signature(others) == inputs.signature(found)
    fewer = inputs.leaves((again,), {})
    assert inputs.signature(fewer) != inputs.signature(found)


def test_what_cannot_be_looked_into_is_no_input() -> None:
    class Broken:
        def keys(self) -> None:
            raise RuntimeError

        values = offset_per_key = keys

    cyclic: list[Any] = [torch.arange(2)]
    cyclic.append(cyclic)
    assert inputs.leaves((Broken(),), {}) == []
    assert len(inputs.leaves((cyclic,), {})) == 4
    assert inputs.leaves(([torch.arange(1)] * 5000,), {}) == []
    del cyclic[:]


def test_looking_keeps_nothing() -> None:
    x = torch.arange(4).view(2, 2)
    kept = weakref.ref(x)
    parts = find(x[:, 1], [x])
    assert parts
    del x
    gc.collect()
    assert kept() is None
