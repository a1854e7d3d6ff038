# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of tables as keys and rows, which the kernels take, and back."""

from __future__ import annotations

import torch

from torch_cpudist.ops.tables import Piece

_SUMMABLE = (torch.float32, torch.float64)


def has_rows(grad: torch.Tensor) -> bool:
    """Whether a gradient is one of rows that the kernels can sum."""
    return (
        grad.layout == torch.sparse_coo
        and grad.sparse_dim() == 1
        and grad.dense_dim() == 1
        and grad.dtype in _SUMMABLE
    )


def piece_of(grad: torch.Tensor) -> Piece:
    """The keys and rows of a gradient that ``has_rows``; they share its memory."""
    return grad._indices(), grad._values()


def gradient_of(piece: Piece, like: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of the parameter ``like`` that has these distinct keys."""
    keys, rows = piece
    return torch.sparse_coo_tensor(keys[None], rows, like.shape, check_invariants=False)
