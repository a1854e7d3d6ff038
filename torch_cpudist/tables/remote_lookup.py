# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forwards of modules whose rows are on servers only.

A lookup gives its rows in memory of their own, eager and compiled alike; a bag pools
those, as torch pools the rows of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_cpudist.errors import UnsupportedModelError
from torch_cpudist.tables import lookup_ops  # noqa: F401  (registers the ops)
from torch_cpudist.tables.binding import (
    FREQUENCY_OBSTACLE,
    MAX_NORM_OBSTACLE,
    TableBinding,
    no_tensor,
)
from torch_cpudist.tables.foreign import check_not_exported
from torch_cpudist.tables.remote_binding import RemoteBinding
from torch_cpudist.tables.weight import as_it_stands

# The overload itself: finding it takes longer than what it has to do.
_lookup = torch.ops.torch_cpudist.lookup.default


class RemoteEmbedding(nn.Embedding):
    """Last base before ``nn.Embedding``, of a remote table."""

    _cpudist_binding: TableBinding
    _cpudist_handle: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows of ``input``, from the servers."""
        _check_options(self)
        with as_it_stands():
            return _looked_up(self, input)


class RemoteEmbeddingBag(nn.EmbeddingBag):
    """Last base before ``nn.EmbeddingBag``, of a remote table."""

    _cpudist_binding: TableBinding
    _cpudist_handle: int

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The pooled rows of ``input``, from the servers."""
        _check_options(self)
        with as_it_stands():
            return pooled(self, input, offsets, per_sample_weights)


def _check_options(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuses what was set after wrapping, and would be refused then."""
    if module.max_norm is None and not module.scale_grad_by_freq:
        return
    why, remedy = MAX_NORM_OBSTACLE
    if module.max_norm is None:
        why, remedy = FREQUENCY_OBSTACLE, "Set scale_grad_by_freq=False."
    raise UnsupportedModelError(f"a lookup in a remote table: {why}. {remedy}")


def handle_in_graph(module: Any) -> int:
    """What names a module's table in a graph; negative for a replaced weight."""
    binding = module._cpudist_binding
    check_not_exported(binding.name, binding.remote)
    # The comparison makes the compiler guard that the weight stays the bound one.
    if module.weight is module._cpudist_binding.weight:
        return int(module._cpudist_handle)
    return -int(module._cpudist_handle)


class _Lookup(torch.autograd.Function):
    """The op, of which nobody but autograd is told: it costs half as much."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        ids: torch.Tensor,
        binding: RemoteBinding,
        padding_idx: int | None,
    ) -> torch.Tensor:
        """The rows of ``ids``, which may get a gradient."""
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx = weight.shape[0], padding_idx
        return _rows(binding, ids, weight, keep=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The sparse gradient of the weight."""
        (ids,) = ctx.saved_tensors
        made = torch.ops.torch_cpudist.lookup_grad(
            grads[0], ids, ctx.rows, ctx.padding_idx
        )
        return made, None, None, None


def _rows(
    binding: RemoteBinding, ids: torch.Tensor, weight: torch.Tensor, keep: bool
) -> torch.Tensor:
    shape = (*ids.shape, weight.shape[1])
    rows = torch.empty(shape, dtype=torch.float32, device="cpu")
    binding.look_up(ids, binding.weight, rows, keep)
    return rows


def _only_autograd_is_told(ids: torch.Tensor) -> bool:
    """Whether no graph, mode, transform or subclass has a say in what ops do."""
    return (
        type(ids) is torch.Tensor
        and ids.is_cpu
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _looked_up(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows ``[*ids.shape, dim]`` whose gradient is the weight's sparse one."""
    weight = module.weight
    if not torch.compiler.is_compiling():
        # Out of sight of the op.
        binding = module._cpudist_binding
        binding.check_not_traced()
        binding.check_weight(weight)
        if isinstance(binding, RemoteBinding) and _only_autograd_is_told(ids):
            if not (torch.is_grad_enabled() and weight.requires_grad):
                return _rows(binding, ids, weight, keep=False)
            return _Lookup.apply(  # type: ignore[no-any-return, no-untyped-call]
                weight, ids, binding, module.padding_idx
            )
        if not isinstance(ids, torch.Tensor):
            raise no_tensor(binding.name, ids)
    keep = torch.is_grad_enabled() and weight.requires_grad
    return _lookup(  # type: ignore[no-any-return]
        weight, ids, handle_in_graph(module), module.padding_idx, keep
    )


def pooled(
    module: Any,
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    per_sample_weights: torch.Tensor | None,
) -> torch.Tensor:
    """What ``nn.EmbeddingBag`` returns.

    Args:
        module: the embedding, wrapped.
        ids: int32 or int64, on the CPU, of one or two dimensions.
        offsets: where bags begin, as torch takes them.
        per_sample_weights: as torch takes them.
    """
    if not isinstance(ids, torch.Tensor):
        raise no_tensor(module._cpudist_binding.name, ids)
    flat = ids.reshape(-1)
    count = flat.numel()
    places = torch.arange(count, dtype=ids.dtype, device=ids.device)
    padding: int | None = None
    rows = _looked_up(module, flat)
    if module.padding_idx is not None:
        # One row more, at whose place bags leave out what is there.
        padding = count
        rows = nn.functional.pad(rows, (0, 0, 0, 1))
        places = torch.where(flat.long() == module.padding_idx, count, places)
    return nn.functional.embedding_bag(
        places.reshape(ids.shape),
        rows,
        offsets,
        mode=module.mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=module.include_last_offset,
        padding_idx=padding,
    )
