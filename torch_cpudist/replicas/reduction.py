# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sums of the replicas' gradients: each parameter by one owner, in replica order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from torch_cpudist.ops.tables import Piece, sum_table_rows
from torch_cpudist.replicas.models import ReplicaModels
from torch_cpudist.replicas.pieces import gradient_of, has_rows, piece_of


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


@torch.no_grad()
def compact_all(models: ReplicaModels, replica: int) -> None:
    """Sums the rows of each key of a replica's sparse gradients; run by its thread.

    They become pieces in memory of their own, in one call for all tables.
    """
    views = models.views[replica]
    summed: dict[int, Piece] = {}
    for index, view in enumerate(views):
        grad = view.grad
        if grad is None or grad.layout != torch.sparse_coo:
            continue
        if has_rows(grad):
            summed[index] = piece_of(grad)
        else:
            view.grad = grad.coalesce()
    found = sum_table_rows([[piece] for piece in summed.values()])
    for index, piece in zip(summed, found, strict=True):
        models.pieces[replica][index] = piece
        views[index].grad = None


@torch.no_grad()
def sum_into(
    models: ReplicaModels, indices: Sequence[int], sort: Callable[[int], bool]
) -> None:
    """Sums the replicas' gradients of some parameters into the model's ``grad``.

    In replica order. Tables take one call for all of them; never a whole table.

    Args:
        models: have the gradients, and then have none but the model's.
        indices: of the parameters.
        sort: whether keys of a table are to ascend, as torch's optimizers want them.
    """
    tables: dict[int, list[Piece]] = {}
    for index in indices:
        pieces = models.pieces_of(index)
        if pieces:
            tables[index] = pieces
        else:
            models.parameters[index].grad = _total(models.gradients_of(index))
    sums = sum_table_rows(list(tables.values()))
    for index, piece in zip(tables, sums, strict=True):
        parameter = models.parameters[index]
        grad = gradient_of(piece, parameter)
        # Sorting adds nothing up any more, in whatever order.
        parameter.grad = grad.coalesce() if sort(index) else grad
    models.drop_gradients(indices)


def _total(grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The sum of one parameter's gradients, in their order; uses the first one up."""
    if not grads:
        return None
    sparse = [grad for grad in grads if grad.layout == torch.sparse_coo]
    if len(sparse) == len(grads):
        return _total_sparse(sparse)
    dense = [grad for grad in grads if grad.layout != torch.sparse_coo]
    summed = dense[0]
    for grad in [*dense[1:], *sparse]:
        summed.add_(grad)
    return summed


def _total_sparse(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of sparse gradients that are none of rows, or in half precision."""
    joined = grads[0]
    if len(grads) > 1:
        joined = torch.sparse_coo_tensor(
            torch.cat([grad._indices() for grad in grads], dim=1),
            torch.cat([grad._values() for grad in grads]),
            grads[0].shape,
            check_invariants=False,
        )
    return joined.coalesce()
