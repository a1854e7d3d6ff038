# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Softmax over the rows of a large table, estimated with drawn negatives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_cpudist.losses.reduction import check_ids, check_shape, reduced, scores
from torch_cpudist.losses.sampling import Negatives

Table = Callable[[torch.Tensor], torch.Tensor]


def sampled_softmax(
    hidden: torch.Tensor,
    table: Table,
    targets: torch.Tensor,
    negatives: Negatives,
    *,
    bias: Table | None = None,
    weights: torch.Tensor | None = None,
    remove_accidental_hits: bool = True,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss of a softmax over all rows of a table, of which few are looked up.

    With s(i, c) = hidden[i] · table(c) + bias(c) - log E(c), where E(c) is how often
    class c is expected among the draws, the loss of sample i is -log(exp s(i, t) /
    (exp s(i, t) + Σ_n exp s(i, n))) over its target t and the negatives n that are not
    t (Jean et al., "On using very large target vocabulary for neural machine
    translation", ACL 2015, section 3; the expectations are those of TensorFlow's
    ``sampled_softmax_loss``). Scores learn what the softmax over all rows would teach
    them, up to a constant per sample; the value is that loss when all classes are
    drawn, with ``unique=True``.

    Rows are looked up by one call of the table: it may be static, remote or open, and
    has a sparse gradient of these rows only.

    Trainers that draw the same negatives (samplers of one seed, as many draws) are one
    process on the joined batch, under ``Sync``; trainers with draws of their own are
    not.

    Args:
        hidden: ``[batch, dim]``, floating point.
        table: an embedding, or another function from ids ``[n]`` to rows ``[n, dim]``.
        targets: int64 ``[batch]``, the class of each sample.
        negatives: what a sampler has drawn for these targets.
        bias: an embedding of dimension 1 over the same classes.
        weights: ``[batch]``, of samples.
        remove_accidental_hits: leave negatives that are a sample's own target out of
            its sum. ``False``: they count as negatives, too.
        reduction: ``"mean"`` (over samples, whatever weights), ``"sum"`` or ``"none"``.

    Returns:
        The loss, float32 at least, also under autocast; 0 without samples.

    Raises:
        InvalidArgumentError: shapes do not fit.

    Cost: one lookup of batch + negatives rows, one product ``[batch, negatives]`` and
    as much memory, some three times. Thread safety: that of the table.
    """
    what = "sampled_softmax"
    check_shape(f"{what}: hidden", hidden, -1, -1)
    count, dim = hidden.shape
    targets = check_ids(f"{what}: targets", targets, count)
    drawn = _checked(negatives, count)
    ids = torch.cat([targets, drawn])
    rows = table(ids)
    check_shape(f"{what}: rows of the table", rows, len(ids), dim)
    far = scores(hidden, rows[count:])
    near = (hidden.to(far.dtype) * rows[:count].to(far.dtype)).sum(1, True)
    logits = torch.cat([near, far], 1)
    if bias is not None:
        offsets = bias(ids)
        check_shape(f"{what}: rows of bias", offsets, len(ids), 1)
        logits = logits + _beside(offsets[:count, 0], offsets[count:, 0])
    expected = _beside(negatives.target_log_counts, negatives.log_counts)
    logits = logits - expected.to(logits.dtype)
    if remove_accidental_hits:
        hits = torch.nn.functional.pad(targets[:, None] == drawn, (1, 0))
        logits = logits.masked_fill(hits, float("-inf"))
    return reduced(what, logits, torch.zeros_like(targets), weights, reduction)


def _checked(negatives: Negatives, targets: int) -> torch.Tensor:
    """The ids that were drawn, if all are there.

    Raises:
        InvalidArgumentError: shapes do not fit.
    """
    what = "sampled_softmax: negatives"
    drawn = check_ids(f"{what}.ids", negatives.ids, -1)
    check_shape(f"{what}.log_counts", negatives.log_counts, len(drawn))
    check_shape(f"{what}.target_log_counts", negatives.target_log_counts, targets)
    return drawn


def _beside(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Values ``[batch, 1 + negatives]`` of each sample's target, and of negatives."""
    return torch.cat([own[:, None], shared.expand(len(own), -1)], dim=1)
