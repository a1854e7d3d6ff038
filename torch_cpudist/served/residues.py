# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a lossy wire makes a trainer's own, for snapshots.

That is what its pushes hold back; and its dense values, which have come rounded. Dense
parameters are whole there, so that any number of servers cuts them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_cpudist.served.set import ParameterSet
from torch_cpudist.snapshot.choice import Plan


def saved(parameters: ParameterSet) -> dict[str, Any]:
    """A copy of all that is held back.

    Returns:
        ``tables``: by name ``keys`` [n] and ``values`` [n, dim]; ``dense``: by name the
        flat elements; ``copies``: the dense values that stand here.
    """
    placement, opened = parameters.placement, parameters.opened
    tables, dense = {}, {}
    for table in placement.tables:
        spec = placement.layout.tables[table.index]
        keys, values = opened.held_rows(table.index)
        tables[spec.name] = {
            "keys": _tensor(keys, torch.int64),
            "values": _tensor(values, torch.float32).view(-1, spec.dim),
        }
    for entry in placement.dense:
        found = torch.zeros(entry.shape.numel(), dtype=torch.float32, device="cpu")
        for number, block in enumerate(placement.layout.blocks):
            if block.parameter == entry.index and (held := opened.held_block(number)):
                end = block.offset + block.elements
                found[block.offset : end] = _tensor(held, torch.float32)
        dense[entry.name] = found
    copies = {e.name: e.parameter.detach().cpu().clone() for e in placement.dense}
    return {"tables": tables, "dense": dense, "copies": copies}


def _tensor(contents: bytes, dtype: torch.dtype) -> torch.Tensor:
    if not contents:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(contents), dtype=dtype)


def restore(parameters: ParameterSet, held: Mapping[str, Any], plan: Plan) -> None:
    """Holds back what was saved, of what a plan takes, and nothing else.

    The next gradient is of the dense values that stood here, as it would have been.

    Args:
        parameters: between two pushes.
        held: from ``saved``; empty: nothing.
        plan: what stands under which name there.
    """
    placement, opened = parameters.placement, parameters.opened
    opened.forget_held()
    tables, dense = held.get("tables", {}), held.get("dense", {})
    for table in placement.tables:
        spec = placement.layout.tables[table.index]
        taken = plan.taken.get(spec.name)
        rows = None if taken is None else tables.get(taken.source)
        if rows is None or rows["values"].shape[1:] != (spec.dim,):
            continue
        keys = rows["keys"].contiguous()
        values = rows["values"].contiguous()
        if len(keys):
            opened.hold_rows(table.index, keys.data_ptr(), len(keys), values.data_ptr())
    _put_copies(parameters, held.get("copies", {}), plan)
    for entry in placement.dense:
        taken = plan.taken.get(entry.name)
        found = None if taken is None else dense.get(taken.source)
        if found is None or found.numel() != entry.shape.numel():
            continue
        for number, block in enumerate(placement.layout.blocks):
            if block.parameter == entry.index:
                end = block.offset + block.elements
                part = found[block.offset : end].contiguous()
                opened.hold_block(number, part.data_ptr())


@torch.no_grad()
def _put_copies(
    parameters: ParameterSet, copies: Mapping[str, torch.Tensor], plan: Plan
) -> None:
    written = []
    for entry in parameters.placement.dense:
        taken = plan.taken.get(entry.name)
        copy = None if taken is None else copies.get(taken.source)
        if copy is not None and copy.shape == entry.shape:
            entry.parameter.copy_(copy)
            written.append(entry.parameter)
    parameters.note_written(written)
