# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a trainer that steps by itself has moved and not handed on, for snapshots.

Values that stand here are the servers' and that. Both are kept as they are, with what
they were when last exchanged: a sum would round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_cpudist.model.placement import DenseParameter
from torch_cpudist.served.local import LocalParameterSet
from torch_cpudist.snapshot.choice import Plan

_ARRAYS = ("rows", "values", "agreed", "touched")


def saved(parameters: LocalParameterSet) -> dict[str, Any]:
    """A copy of it, while no exchange is under way.

    Returns:
        ``tables``: by name ``rows`` [n], ``values`` and ``agreed`` [n, dim], as they
        stand here and as they were last exchanged, and ``touched`` [n], whether the
        next exchange has the row in any case; ``dense``: ``values`` and ``agreed`` of
        those that differ, by name.
    """
    exchange, placement = parameters.exchange, parameters.placement
    tables = {}
    for table in placement.tables:
        count = exchange.moved_count(table.index)
        dim = table.found.weight.shape[1]
        arrays = (
            torch.empty(count, dtype=torch.int64),
            torch.empty(count, dim),
            torch.empty(count, dim),
            torch.empty(count, dtype=torch.uint8),
        )
        exchange.read_moved(table.index, _addresses(arrays))
        tables[table.found.name] = dict(zip(_ARRAYS, arrays, strict=True))
    agreed = [torch.empty(one.shape, dtype=one.dtype) for one in placement.dense]
    exchange.read_agreed([one.data_ptr() for one in agreed])
    dense = {
        entry.name: {"values": here, "agreed": was}
        for entry, was in zip(placement.dense, agreed, strict=True)
        if not _same_bits(here := _copy_of(entry), was)
    }
    return {"tables": tables, "dense": dense}


def put_back(
    parameters: LocalParameterSet, found: Mapping[str, Any], plan: Plan
) -> list[str]:
    """Has it moved again, on top of the servers' values, which have been taken in.

    Args:
        parameters: between two exchanges.
        found: from ``saved``.
        plan: what is taken of the snapshot.

    Returns:
        Names of parameters whose movement could not be put back.
    """
    lost = _put_rows(parameters, found["tables"], plan)
    entries, agreed = parameters.placement.dense, []
    for entry in entries:
        taken = plan.taken.get(entry.name)
        one = None if taken is None else found["dense"].get(taken.source)
        if one is not None and not _fits(entry, one):
            lost.append(entry.name)
            one = None
        agreed.append(None if one is None else one["agreed"].contiguous())
        if one is not None:
            with torch.no_grad():
                entry.parameter.copy_(one["values"])
    parameters.exchange.write_agreed(
        [0 if one is None else one.data_ptr() for one in agreed]
    )
    parameters.accept_changes()
    return lost


def _put_rows(
    parameters: LocalParameterSet, found: Mapping[str, Any], plan: Plan
) -> list[str]:
    parameters.bind_tables()
    lost = []
    for table in parameters.placement.tables:
        taken = plan.taken.get(table.found.name)
        one = None if taken is None else found.get(taken.source)
        if one is None:
            continue
        arrays = tuple(one[name].contiguous() for name in _ARRAYS)
        count, dim = len(arrays[0]), table.found.weight.shape[1]
        shapes = [tuple(array.shape) for array in arrays]
        if shapes != [(count,), (count, dim), (count, dim), (count,)]:
            lost.append(table.found.name)
            continue
        put = parameters.exchange.write_moved(table.index, count, _addresses(arrays))
        if put < count:
            lost.append(table.found.name)
    return lost


def _fits(entry: DenseParameter, one: Mapping[str, torch.Tensor]) -> bool:
    kind = (tuple(entry.shape), entry.dtype)
    return all(
        (tuple(o.shape), o.dtype) == kind for o in (one["values"], one["agreed"])
    )


def _copy_of(entry: DenseParameter) -> torch.Tensor:
    return entry.parameter.detach().to(device="cpu", copy=True).contiguous()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (t.reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def _addresses(
    arrays: tuple[torch.Tensor, ...],
) -> tuple[int, int, int, int]:
    rows, values, agreed, touched = arrays
    return rows.data_ptr(), values.data_ptr(), agreed.data_ptr(), touched.data_ptr()
