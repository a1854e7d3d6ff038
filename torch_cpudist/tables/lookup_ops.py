# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The dispatcher ops that compiled models call for lookups of tables.

A graph cannot hold a Python object, so it names a table by its handle; a negative one
stands for a table whose module was given another weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_cpudist.errors import ClosedError
from torch_cpudist.machine.staging import sparse_gradient
from torch_cpudist.tables.binding import TableBinding, bound, weight_replaced
from torch_cpudist.tables.remote_binding import RemoteBinding
from torch_cpudist.tables.weight import as_it_stands, looks_at_no_rows


def _bound(handle: int) -> TableBinding:
    binding = bound(abs(handle))
    if binding is None:
        raise ClosedError(
            "this compiled graph looks up a table whose DistributedOptimizer is gone. "
            "Compile the model again after wrapping."
        )
    if handle < 0:
        raise weight_replaced(binding.name)
    return binding


# The results depend on the pull, which orders it before the read without declaring the
# weight mutated, for which a functionalised graph would copy the whole table.
_library = torch.library.Library("torch_cpudist", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "pull(Tensor ids, int handle) -> Tensor",
    "lookup(Tensor weight, Tensor ids, int handle, int? padding_idx, bool keep=True) "
    "-> Tensor",
    "lookup_grad(Tensor grad, Tensor ids, SymInt rows, int? padding_idx) -> Tensor",
    "add_grads(Tensor first, Tensor second) -> Tensor",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


def _pull_op(ids: torch.Tensor, handle: int) -> torch.Tensor:
    """Pulls rows; the copy of ``ids`` is what the lookup then uses."""
    binding = _bound(handle)
    binding.pull(ids, binding.weight)
    return ids.clone()


def _lookup_op(
    weight: torch.Tensor,
    ids: torch.Tensor,
    handle: int,
    padding_idx: int | None,
    keep: bool = True,
) -> torch.Tensor:
    """Pulls rows and gathers them.

    Args:
        weight: the table's, or a replica's view of it.
        ids: int32 or int64, any shape.
        handle: of the binding.
        padding_idx: the row that gets no gradient, if any.
        keep: of a remote table, whether a gradient may follow. Rows of others stay in
            the weight.
    """
    binding = _bound(handle)
    if isinstance(binding, RemoteBinding):
        shape = (*ids.shape, weight.shape[1])
        rows = torch.empty(shape, dtype=torch.float32, device="cpu")
        binding.look_up(ids, binding.weight, rows, keep)
        return rows
    binding.pull(ids, binding.weight)
    with as_it_stands():
        return torch.nn.functional.embedding(ids, weight, padding_idx, sparse=True)


def _lookup_grad_op(
    grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int | None
) -> torch.Tensor:
    """The sparse gradient of a lookup, over memory of its own.

    torch's own one aliases the upstream gradient, whose memory a graph compiled by
    inductor uses again for other results while the gradient is still needed.
    """
    flat = ids.reshape(-1).to(torch.int64, copy=True)
    values = grad.reshape(flat.numel(), grad.shape[-1]).clone()
    return sparse_gradient(flat, values, rows, padding_idx)


def _add_grads_op(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum of two sparse gradients of one weight."""
    return first + second


_library.impl("pull", _pull_op, "CPU")  # type: ignore[no-untyped-call]
_library.impl("lookup", _lookup_op, "CPU")  # type: ignore[no-untyped-call]
_library.impl("lookup_grad", _lookup_grad_op, "CPU")  # type: ignore[no-untyped-call]
_library.impl("add_grads", _add_grads_op, "SparseCPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("torch_cpudist::pull", lib=_library)  # type: ignore[untyped-decorator]
def _pull_fake(ids: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("torch_cpudist::lookup", lib=_library)  # type: ignore[untyped-decorator]
def _lookup_fake(
    weight: torch.Tensor,
    ids: torch.Tensor,
    handle: int,
    padding_idx: int | None,
    keep: bool = True,
) -> torch.Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@torch.library.register_fake("torch_cpudist::lookup_grad", lib=_library)  # type: ignore[untyped-decorator]
def _lookup_grad_fake(
    grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int | None
) -> torch.Tensor:
    keys = ids.new_empty((1, ids.numel()), dtype=torch.int64)
    values = grad.new_empty((ids.numel(), grad.shape[-1]))
    return torch.sparse_coo_tensor(
        keys, values, (rows, grad.shape[-1]), check_invariants=False
    )


@torch.library.register_fake("torch_cpudist::add_grads", lib=_library)  # type: ignore[untyped-decorator]
def _add_grads_fake(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    # inductor asks with strided tensors: they are of the same shape.
    device, dim = first.device, first.shape[1]
    keys = torch.empty((1, 0), dtype=torch.int64, device=device)
    values = torch.empty((0, dim), dtype=first.dtype, device=device)
    return torch.sparse_coo_tensor(
        keys, values, (first.shape[0], dim), check_invariants=False
    )


# By which a graph is traced, if one is.
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def _sums_as_ops() -> None:
    """Has the graph that is traced add sparse gradients by an op of ours.

    What torch's ``add`` gives for them inductor takes for strided, so that no weight
    could be looked up twice in one graph; what an op of others gives it hands on.
    """
    mode: Any = torch._C._get_dispatch_mode(_PROXY)
    table = getattr(mode, "decomposition_table", None)
    add = torch.ops.aten.add.Tensor
    # inductor's, and this graph's own.
    if isinstance(table, dict) and add in table and not isinstance(table[add], _Sum):
        table[add] = _Sum(table[add])


class _Sum:
    """How a graph adds: as before, but for sparse matrices of one shape."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, first: Any, second: Any, **options: Any) -> Any:
        if not options and _is_gradient(first) and _is_gradient(second):
            if first.shape == second.shape:
                return torch.ops.torch_cpudist.add_grads(first, second)
        return self._before(first, second, **options)


def _is_gradient(value: Any) -> bool:
    """Whether it is like the sparse gradient of a table."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_sparse
        and value.is_cpu
        and value.sparse_dim() == 1
        and value.dense_dim() == 1
    )


def _save_for_grad(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, ids, _, ctx.padding_idx, _ = inputs
    ctx.save_for_backward(ids)
    ctx.rows = weight.shape[0]


def _lookup_backward(
    ctx: Any, grad: torch.Tensor
) -> tuple[torch.Tensor, None, None, None, None]:
    _sums_as_ops()
    (ids,) = ctx.saved_tensors
    result = torch.ops.torch_cpudist.lookup_grad(grad, ids, ctx.rows, ctx.padding_idx)
    return result, None, None, None, None


torch.library.register_autograd(
    "torch_cpudist::lookup",
    _lookup_backward,
    setup_context=_save_for_grad,
    lib=_library,
)


@torch.library.register_vmap("torch_cpudist::lookup", lib=_library)  # type: ignore[untyped-decorator]
def _lookup_of_all(
    info: Any,
    in_dims: tuple[int | None, ...],
    weight: torch.Tensor,
    ids: torch.Tensor,
    handle: int,
    padding_idx: int | None,
    keep: bool = True,
) -> tuple[torch.Tensor, int]:
    """Under ``torch.vmap``: the rows of all its calls come at once."""
    together = ids.movedim(in_dims[1] or 0, 0)
    found = torch.ops.torch_cpudist.lookup(weight, together, handle, padding_idx, keep)
    return found, 0


_lookup = torch.ops.torch_cpudist.lookup
looks_at_no_rows(_lookup, _lookup.default)
