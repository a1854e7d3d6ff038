# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Skip-gram with negative sampling as a torch module: two embeddings and their loss."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from word2vec_batches import Batch, Sampling


class NegativeSampling(torch.autograd.Function):
    """The loss of a batch, summed over its pairs, with gradients made on the way.

    For a pair of input x and output t, and negatives n_1 … n_k of the block:
    ``-log s(x.t) - negatives / k * sum_i log s(-x.n_i)`` with s the logistic function.
    The gradients cost two more products each of the same small matrices, which autograd
    would make as well, but with a copy of every slice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        pairs: torch.Tensor,
        negatives: float,
    ) -> torch.Tensor:
        """Return the loss.

        Args:
            ctx: of autograd.
            inputs: ``[b * n, dim]``, contiguous, vectors of ``Batch.inputs``.
            outputs: the same of ``Batch.outputs``.
            pairs: ``Batch.pairs``.
            negatives: weight of a pair's negatives together.
        """
        blocks, size, reach = pairs.shape
        halo, dim = reach - 1, inputs.shape[1]
        text = blocks * size
        x = inputs.view(blocks, size, dim)
        # Blocks overlap: each sees the words before and after it, too.
        t = outputs.as_strided((blocks, size + halo, dim), (size * dim, dim, 1))
        n = outputs[text + halo :].view(blocks, -1, dim)
        near = torch.bmm(x, t.transpose(1, 2))
        # Row i of a block has its pairs at i … i + 2 * window: a band of the product.
        width = size + halo
        band = near.as_strided((blocks, size, reach), (size * width, width + 1, 1))
        far = torch.bmm(x, n.transpose(1, 2))
        weight = pairs.sum(dim=2, keepdim=True).mul_(negatives / n.shape[1])
        loss = torch.dot(F.softplus(-band).view(-1), pairs.view(-1))
        loss += torch.dot(F.softplus(far).sum(dim=2).view(-1), weight.view(-1))
        near_slope = torch.sigmoid(band).sub_(1).mul_(pairs)
        far_slope = far.sigmoid_().mul_(weight)
        band.copy_(near_slope)
        outside = near_outside(size, halo, near.device)
        near.masked_fill_(outside, 0)
        to_inputs = torch.bmm(near, t).baddbmm_(far_slope, n)
        to_outputs = torch.empty_like(outputs)
        to_near = torch.bmm(near.transpose(1, 2), x)
        to_outputs[:text].view(blocks, size, dim).copy_(to_near[:, :size])
        to_outputs[text : text + halo].zero_()
        # Of what a block gives the words after it, two blocks never meet in one place.
        after = to_outputs.as_strided(
            (blocks, halo, dim), (size * dim, dim, 1), size * dim
        )
        after.add_(to_near[:, size:])
        to_far = to_outputs[text + halo :].view(blocks, -1, dim)
        torch.bmm(far_slope.transpose(1, 2), x, out=to_far)
        ctx.save_for_backward(to_inputs.view(text, dim), to_outputs)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of both, times the one that comes from above."""
        to_inputs, to_outputs = ctx.saved_tensors
        scale = float(upstream[0])
        if scale != 1.0:
            return to_inputs * scale, to_outputs * scale, None, None
        return to_inputs, to_outputs, None, None


_outside: dict[tuple[int, int], torch.Tensor] = {}


def near_outside(size: int, halo: int, device: torch.device) -> torch.Tensor:
    """Return which entries ``[size, size + halo]`` of a block can be no pairs."""
    if (size, halo) not in _outside:
        ones = torch.ones(size, size + halo, dtype=torch.bool, device=device)
        _outside[size, halo] = ~(ones.triu() & ones.tril(halo))
    return _outside[size, halo]


class SkipGram(nn.Module):
    """A vector for every word as an input, and another for it as an output."""

    def __init__(self, words: int, sampling: Sampling, dim: int = 100) -> None:
        """Make the tables, as word2vec's program does: small inputs, outputs of 0."""
        super().__init__()
        if sampling.block < 2 * sampling.window:
            raise ValueError(
                f"expected blocks of at least {2 * sampling.window} words, twice the "
                f"window, found {sampling.block}"
            )
        self.negatives = float(sampling.negatives)
        self.inputs = nn.Embedding(words, dim, sparse=True)
        self.outputs = nn.Embedding(words, dim, sparse=True)
        nn.init.uniform_(self.inputs.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.outputs.weight)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch, summed over its pairs."""
        loss = NegativeSampling.apply(
            self.inputs(batch.inputs),
            self.outputs(batch.outputs),
            batch.pairs,
            self.negatives,
        )
        return cast(torch.Tensor, loss)
