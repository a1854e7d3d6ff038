# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Softmax over the items of a batch: those of other samples are the negatives."""

from __future__ import annotations

import torch

from torch_cpudist.errors import InvalidArgumentError
from torch_cpudist.losses.reduction import check_ids, check_shape, reduced, scores


def in_batch_softmax(
    queries: torch.Tensor,
    items: torch.Tensor,
    *,
    log_q: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    temperature: float = 1.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss of two towers whose negatives are the other items of the batch.

    With s(i, j) = queries[i] · items[j] / temperature - log_q[j], the loss of sample i
    is -log(exp s(i, i) / Σ_j exp s(i, j)), over all items j of this call.

    An item is a negative as often as it comes up in batches, popular ones far too often
    for a softmax over all items. ``log_q`` corrects that: products learn what that
    softmax would teach them, up to a constant per query (Yi et al.,
    "Sampling-bias-corrected neural modeling for large corpus item recommendations",
    RecSys 2019, section 3). Retrieval ranks by queries · items, without it. The value
    of the loss is not that of the softmax over all items.

    Negatives are those of this call, on this trainer: several trainers, under ``Sync``
    too, train as one process that adds up the losses of their batches, and not as one
    process on the joined batch, in which every sample has more negatives.

    Args:
        queries: ``[batch, dim]``, floating point.
        items: ``[items, dim]``; item i < batch is that of query i, further ones are
            negatives of all (mixed or hard negatives).
        log_q: ``[items]``, log of how likely each is to be in a batch. A constant added
            to all of them changes nothing: log of counts will do. ``None``: no
            correction, as if all were equally likely.
        ids: int64 ``[items]``: an item is no negative of a query whose own is the same
            one (accidental hits). ``None``: all are different ones.
        weights: ``[batch]``, of samples (rewards); 0 leaves one out, not its item.
        temperature: scores are divided by it; above 0.
        reduction: ``"mean"`` (the sum over the number of samples, whatever the
            weights), ``"sum"``, or ``"none"`` for ``[batch]``.

    Returns:
        The loss, float32 at least, also under autocast; 0 without samples.

    Raises:
        InvalidArgumentError: shapes do not fit, or an argument is out of range.

    Cost: one product ``[batch, items]``, and as much memory, some three times. Thread
    safety: a pure function.
    """
    what = "in_batch_softmax"
    check_shape(f"{what}: queries", queries, -1, -1)
    count, dim = queries.shape
    check_shape(f"{what}: items", items, -1, dim)
    if len(items) < count:
        raise InvalidArgumentError(
            f"{what}: expected an item for each of {count} queries, got {len(items)}"
        )
    if not temperature > 0:
        told = f"temperature must be above 0, got {temperature!r}"
        raise InvalidArgumentError(f"{what}: {told}")
    logits = scores(queries, items) / temperature
    if log_q is not None:
        check_shape(f"{what}: log_q", log_q, len(items))
        logits = logits - log_q.to(logits.dtype)
    if ids is not None:
        ids = check_ids(f"{what}: ids", ids, len(items))
        hits = (ids[:count, None] == ids).fill_diagonal_(False)
        logits = logits.masked_fill(hits, float("-inf"))
    places = torch.arange(count, device=logits.device)
    return reduced(what, logits, places, weights, reduction)
