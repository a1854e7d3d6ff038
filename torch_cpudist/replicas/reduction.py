# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sums of the replicas' gradients: each parameter by one owner, in replica order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from torch_cpudist import ops


def deal_owners(
    parameters: Sequence[torch.Tensor], sparse: Collection[int], count: int
) -> list[list[int]]:
    """Deals parameters to owners: the largest first, to who has the fewest elements.

    Tables are dealt apart from the others: what there is to do for one depends on the
    rows of a batch, not on its elements.

    Args:
        parameters: of the model.
        sparse: ``id`` of those that are tables.
        count: how many owners.

    Returns:
        By owner, indices of its parameters, in their order.
    """
    owned: list[list[int]] = [[] for _ in range(count)]
    by_size = sorted(range(len(parameters)), key=lambda i: (-parameters[i].numel(), i))
    for tables in (False, True):
        loads = [0] * count
        for index in by_size:
            if (id(parameters[index]) in sparse) == tables:
                owner = loads.index(min(loads))
                loads[owner] += max(parameters[index].numel(), 1)
                owned[owner].append(index)
    return [sorted(indices) for indices in owned]


def compact(grad: torch.Tensor) -> torch.Tensor:
    """A replica's sparse gradient with every key once, in memory of its own."""
    summable = (torch.float32, torch.float64)
    if grad.sparse_dim() != 1 or grad.dense_dim() != 1 or grad.dtype not in summable:
        return grad.coalesce()
    keys, values = ops.dedupe_segment_sum(
        grad._indices()[0].contiguous(), grad._values().contiguous()
    )
    return torch.sparse_coo_tensor(
        keys[None], values, grad.shape, check_invariants=False
    )


@torch.no_grad()
def compact_all(views: Sequence[nn.Parameter]) -> None:
    """``compact`` for every sparse gradient of a replica; run by its thread."""
    for view in views:
        if view.grad is not None and view.grad.layout == torch.sparse_coo:
            view.grad = compact(view.grad)


def total(grads: Sequence[torch.Tensor | None], sort: bool) -> torch.Tensor | None:
    """The sum of one parameter's gradients, in replica order; uses the first one up.

    Dense ones are added into the first. Sparse ones become keys and rows, every key
    once; never a whole table.

    Args:
        grads: by replica; ``None`` where it has none.
        sort: keys in ascending order, as torch's optimizers want them.
    """
    found = [grad for grad in grads if grad is not None]
    if not found:
        return None
    sparse = [grad for grad in found if grad.layout == torch.sparse_coo]
    if len(sparse) == len(found):
        return _total_rows(sparse, sort)
    dense = [grad for grad in found if grad.layout != torch.sparse_coo]
    summed = dense[0]
    for grad in [*dense[1:], *sparse]:
        summed.add_(grad)
    return summed


def _total_rows(grads: Sequence[torch.Tensor], sort: bool) -> torch.Tensor:
    if len(grads) == 1:
        joined = grads[0]
    else:
        joined = torch.sparse_coo_tensor(
            torch.cat([grad._indices() for grad in grads], dim=1),
            torch.cat([grad._values() for grad in grads]),
            grads[0].shape,
            check_invariants=False,
        )
    if len(grads) > 1:
        joined = compact(joined)
    # Sorting adds nothing up any more, in whatever order.
    return joined.coalesce() if sort else joined
