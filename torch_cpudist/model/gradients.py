# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reads gradients as autograd leaves them, without a copy where their layout allows.

What is read here aliases ``.grad`` and is used up before ``step()`` returns. Behind the
conjugate of a complex tensor torch leaves gradients whose memory has the other sign
(``is_neg()``); these are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from torch_cpudist.errors import DenseGradientError, UnsupportedModelError


def read_table_gradient(
    name: str, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the COO gradient of a table.

    Args:
        name: the table's name, for messages.
        grad: the ``grad`` of the table's weight.

    Returns:
        Keys int64 ``[n]``, duplicates allowed, in batch order, and rows float32 ``[n,
        dim]``, both contiguous.

    Raises:
        DenseGradientError: the gradient is strided.
        UnsupportedModelError: it is not float32.
    """
    if grad.layout != torch.sparse_coo:
        raise DenseGradientError(
            f"table {name!r} has a dense gradient (layout {grad.layout}), expected a "
            "sparse one from its lookups. Something else uses the whole weight in the "
            "loss: an output layer tied to it, or an L2 penalty over it. Take that out "
            "(use the optimizer's weight_decay, or a penalty on the looked-up rows), "
            "or set sparse=False on the embedding to train it as a dense parameter."
        )
    if grad.sparse_dim() != 1 or grad.dense_dim() != 1:
        raise DenseGradientError(
            f"table {name!r} has a gradient with sparse_dim={grad.sparse_dim()}, "
            f"dense_dim={grad.dense_dim()}; expected 1 and 1."
        )
    if grad.dtype != torch.float32:
        raise UnsupportedModelError(
            f"table {name!r} has a gradient of {grad.dtype}, expected torch.float32. "
            "Leave the weight's grad_dtype as it is."
        )
    values = grad._values().contiguous().resolve_neg()
    return grad._indices()[0].contiguous(), values


def read_dense_gradient(
    name: str, grad: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Reads the strided gradient of a dense parameter.

    Args:
        name: the parameter's name, for messages.
        grad: the ``grad`` of the parameter.
        dtype: that the servers hold.

    Returns:
        Contiguous tensor of the parameter's shape and dtype.

    Raises:
        UnsupportedModelError: the gradient is sparse or of another dtype.
    """
    if grad.layout != torch.strided:
        raise UnsupportedModelError(
            f"parameter {name!r} has a gradient of layout {grad.layout}, but is no "
            "table: the model passed to DistributedOptimizer contained no nn.Embedding "
            "or nn.EmbeddingBag with sparse=True and this weight. Pass the model that "
            "contains it, look it up through such a module, or set sparse=False."
        )
    if grad.dtype != dtype:
        raise UnsupportedModelError(
            f"parameter {name!r} has a gradient of {grad.dtype}, expected {dtype}. "
            "Leave the parameter's dtype and grad_dtype as when its optimizer was "
            "wrapped."
        )
    return grad.contiguous().resolve_neg()


@contextmanager
def replaced_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> Iterator[None]:
    """While it is entered, parameters have other gradients than their own."""
    own = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient


def hidden_gradients(
    parameters: Sequence[torch.Tensor],
) -> AbstractContextManager[None]:
    """While it is entered, parameters have no gradient: torch skips them."""
    return replaced_gradients(parameters, [None] * len(parameters))
