# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Typed wrappers of the dispatcher ops in the compiled core.

The ops themselves (``torch.ops.torch_cpudist.*``) can raise ``RuntimeError`` only and
do not bump ``Tensor._version``; these functions check arguments first and do. All are
local (no messages), run on the CPU without the GIL, and may be called from any thread
as long as no other thread writes to the same tensors. Results depend neither on the
vector instructions in use nor on the number of threads.

Symbols: ``n`` keys of a batch, ``u`` distinct keys among them, ``dim`` elements of a
row.
"""

from __future__ import annotations

import torch

from torch_cpudist import _core
from torch_cpudist.ops import fake
from torch_cpudist.ops.checks import (
    check_update_rows,
    config_arguments,
    fail,
    range_errors,
    require_contiguous,
    require_keys,
    require_length,
    require_real,
    require_tensor,
)

fake.register()

BUCKET_COUNT = 4096
_MAX_PARTS = 65535


def dedupe_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the distinct keys of a batch.

    Unlike ``torch.unique`` it does not sort: O(n).

    Args:
        keys: int32 or int64 ``[n]``, any values.

    Returns:
        ``unique`` int64 ``[u]`` in the order of first occurrence, and ``inverse`` int64
        ``[n]`` with ``unique[inverse] == keys``.

    Raises:
        TypeError: ``keys`` is no tensor or has another dtype.
        InvalidArgumentError: wrong number of dimensions or device.
    """
    require_keys("dedupe_keys", "keys", keys, narrow=True)
    unique, inverse = torch.ops.torch_cpudist.dedupe_keys(keys)
    return unique, inverse


def segment_sum(rows: torch.Tensor, inverse: torch.Tensor, count: int) -> torch.Tensor:
    """Adds the rows of each segment, in the order of the batch.

    Args:
        rows: float32 or float64 ``[n, dim]``.
        inverse: int64 ``[n]``, the segment of each row, in ``[0, count)``.
        count: number of segments; those without a row become zero.

    Returns:
        ``[count, dim]`` of the dtype of ``rows``.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        RowOutOfRangeError: an ``inverse`` is outside ``[0, count)``.
        InvalidArgumentError: shapes do not fit or ``count`` is negative.
    """
    op = "segment_sum"
    require_real(op, "rows", rows, 2)
    require_keys(op, "inverse", inverse)
    require_length(op, "len(rows)", rows.shape[0], inverse.shape[0])
    if count < 0:
        fail(f"{op}: count must be >= 0, got {count}")
    with range_errors(op, "inverse", inverse, count):
        result: torch.Tensor = torch.ops.torch_cpudist.segment_sum(rows, inverse, count)
    return result


def dedupe_segment_sum(
    keys: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the rows that share a key: ``dedupe_keys`` and ``segment_sum`` in one.

    Args:
        keys: int32 or int64 ``[n]``, any values.
        rows: float32 or float64 ``[n, dim]``.

    Returns:
        ``unique`` int64 ``[u]`` in the order of first occurrence, and the sums ``[u,
        dim]``.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        InvalidArgumentError: shapes do not fit.
    """
    op = "dedupe_segment_sum"
    require_keys(op, "keys", keys, narrow=True)
    require_real(op, "rows", rows, 2)
    require_length(op, "len(rows)", rows.shape[0], keys.shape[0])
    unique, sums = torch.ops.torch_cpudist.dedupe_segment_sum(keys, rows)
    return unique, sums


def partition_keys(
    keys: torch.Tensor, bucket_owner: torch.Tensor, salt: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups keys by the server that owns them.

    Args:
        keys: int64 ``[n]``.
        bucket_owner: int64 ``[4096]``, the owner of each bucket, in ``[0, parts)``.
        salt: unsigned 64-bit salt of the table.
        parts: number of servers, in ``[1, 65535]``.

    Returns:
        ``order`` int64 ``[n]``, positions in ``keys`` grouped by owner and in their
        original order within one; ``offsets`` int64 ``[parts + 1]``, where each owner's
        group starts.

    Raises:
        TypeError: an argument is no tensor or has another dtype.
        InvalidArgumentError: a shape, an owner, ``parts`` or ``salt`` is out of range.
    """
    op = "partition_keys"
    require_keys(op, "keys", keys)
    require_keys(op, "bucket_owner", bucket_owner)
    require_length(op, "len(bucket_owner)", bucket_owner.shape[0], BUCKET_COUNT)
    if not 1 <= parts <= _MAX_PARTS:
        fail(f"{op}: parts must be in [1, 65535], got {parts}")
    if not 0 <= salt < 2**64:
        fail(f"{op}: salt must be in [0, 2**64), got {salt}")
    bits = salt - 2**64 if salt >= 2**63 else salt
    with range_errors(op, "bucket_owner", bucket_owner, parts):
        order, offsets = torch.ops.torch_cpudist.partition_keys(
            keys, bucket_owner, bits, parts
        )
    return order, offsets


def gather_rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Copies rows: ``source[index]``.

    Args:
        source: ``[rows, dim]`` of any dtype, each row contiguous.
        index: int64 ``[n]``.

    Returns:
        ``[n, dim]`` of the dtype of ``source``, no part of any autograd graph.

    Raises:
        TypeError: an argument is no tensor or ``index`` has another dtype.
        RowOutOfRangeError: an index is outside ``[0, rows)``.
        InvalidArgumentError: shapes or strides do not fit.
    """
    op = "gather_rows"
    require_tensor(op, "source", source, (), 2)
    if source.shape[1] > 1 and source.stride(1) != 1:
        fail(
            f"{op}: each row of source must be contiguous, got strides "
            f"{source.stride()}"
        )
    require_keys(op, "index", index)
    with range_errors(op, "index", index, source.shape[0]):
        result: torch.Tensor = torch.ops.torch_cpudist.gather_rows(
            source.detach(), index
        )
    return result


def scatter_rows(
    target: torch.Tensor, index: torch.Tensor, source: torch.Tensor
) -> None:
    """Overwrites rows in place: ``target[index] = source``.

    With equal indices the last row stays. Not recorded by autograd; ``target._version``
    grows.

    Args:
        target: ``[rows, dim]`` of any dtype, contiguous.
        index: int64 ``[n]``.
        source: ``[n, dim]`` of the dtype of ``target``.

    Raises:
        TypeError: an argument is no tensor or dtypes differ.
        RowOutOfRangeError: an index is outside ``[0, rows)``; nothing was written.
        InvalidArgumentError: shapes or strides do not fit; nothing was written.
    """
    op = "scatter_rows"
    require_tensor(op, "target", target, (), 2)
    require_contiguous(op, "target", target)
    require_keys(op, "index", index)
    require_tensor(op, "source", source, (target.dtype,), 2)
    require_length(op, "len(source)", source.shape[0], index.shape[0])
    require_length(op, "source.shape[1]", source.shape[1], target.shape[1])
    with range_errors(op, "index", index, target.shape[0]):
        torch.ops.torch_cpudist.scatter_rows(target.detach(), index, source.detach())
    torch.autograd.graph.increment_version(target)


def update_rows(
    weight: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    grads: torch.Tensor,
    config: _core.OptimizerConfig,
    *,
    step: int | None = None,
    counts: torch.Tensor | None = None,
) -> None:
    """Runs one fused optimizer step on some rows of a table, in place.

    Exactly one of ``step`` and ``counts`` must be given. Not recorded by autograd; the
    ``_version`` of every tensor written to grows.

    Args:
        weight: float32 or float64 ``[rows, dim]``, contiguous.
        state: ``[rows, k]`` of the same dtype, contiguous, where ``k`` is
            ``_core.state_elements(config, dim, dim)``: per row what the optimizer keeps
            (Adam: first, then second moments; FTRL: z, then n).
        keys: int64 ``[n]``, the rows to update, distinct: duplicates must have been
            summed (``dedupe_segment_sum``), or the row is updated once for each of
            them.
        grads: ``[n, dim]`` of the same dtype.
        config: optimizer and hyper-parameters.
        step: number of this update, from 1, one for all rows (as torch counts).
        counts: int64 ``[rows]``, contiguous: updates of each row so far; those of
            ``keys`` are raised by one and are then the step numbers (lazy optimizers).

    Raises:
        TypeError: an argument is no tensor or dtypes differ.
        RowOutOfRangeError: a key is outside ``[0, rows)``; nothing was written.
        InvalidArgumentError: shapes, strides or ``step`` do not fit; nothing was
            written.
    """
    check_update_rows(weight, state, keys, grads, config, step, counts)
    kind, flags, hyper = config_arguments(config)
    with range_errors("update_rows", "keys", keys, weight.shape[0]):
        torch.ops.torch_cpudist.update_rows(
            weight.detach(),
            state,
            counts,
            keys,
            grads.detach(),
            kind,
            flags,
            hyper,
            step or 0,
        )
    written = [weight, state] if counts is None else [weight, state, counts]
    torch.autograd.graph.increment_version(written)


def update_dense(
    weight: torch.Tensor,
    state: torch.Tensor,
    grad: torch.Tensor,
    config: _core.OptimizerConfig,
    *,
    step: int,
) -> None:
    """Runs one fused optimizer step on a whole dense parameter, in place.

    Not recorded by autograd; the ``_version`` of every tensor written to grows.

    Args:
        weight: float32 or float64, any shape, contiguous. A row is everything behind
            the first dimension; a vector has rows of one element.
        state: of the same dtype and ``_core.state_elements(config, weight.numel(),
            row)`` elements, contiguous.
        grad: of the dtype and shape of ``weight``.
        config: optimizer and hyper-parameters.
        step: number of this update, from 1.

    Raises:
        TypeError: an argument is no tensor or dtypes differ.
        InvalidArgumentError: shapes, strides or ``step`` do not fit; nothing was
            written.
    """
    op = "update_dense"
    require_real(op, "weight", weight, None)
    require_contiguous(op, "weight", weight)
    require_tensor(op, "state", state, (weight.dtype,), None)
    require_contiguous(op, "state", state)
    require_tensor(op, "grad", grad, (weight.dtype,), None)
    if grad.shape != weight.shape:
        fail(
            f"{op}: grad must have shape {tuple(weight.shape)}, got {tuple(grad.shape)}"
        )
    row_width = max(1, weight[0].numel()) if weight.dim() > 1 and len(weight) else 1
    elements = _core.state_elements(config, weight.numel(), row_width)
    require_length(op, f"state.numel() for {config.kind}", state.numel(), elements)
    if step < 1:
        fail(f"{op}: step must be >= 1, got {step}")
    kind, flags, hyper = config_arguments(config)
    torch.ops.torch_cpudist.update_dense(
        weight.detach(), state, grad.detach(), row_width, kind, flags, hyper, step
    )
    torch.autograd.graph.increment_version([weight, state])


def slice_parameter(
    numel: int,
    row_width: int,
    server_count: int,
    min_block_size: int,
    slice: bool = True,
) -> torch.Tensor:
    """Cuts a flattened dense parameter into the blocks that servers own.

    At most one block per server and per ``min_block_size`` elements, of equal size
    rounded up to whole rows.

    Args:
        numel: elements of the parameter, >= 0.
        row_width: product of all its dimensions but the first, >= 1.
        server_count: number of servers, >= 1.
        min_block_size: smallest block worth a server of its own, in elements, >= 1.
        slice: ``False`` gives one block.

    Returns:
        int64 ``[blocks, 2]``: first element and length of each block.

    Raises:
        InvalidArgumentError: a value is out of range.
    """
    op = "slice_parameter"
    if numel < 0:
        fail(f"{op}: numel must be >= 0, got {numel}")
    for name, value in (
        ("row_width", row_width),
        ("server_count", server_count),
        ("min_block_size", min_block_size),
    ):
        if value < 1:
            fail(f"{op}: {name} must be >= 1, got {value}")
    result: torch.Tensor = torch.ops.torch_cpudist.slice_parameter(
        numel, row_width, server_count, min_block_size, slice
    )
    return result
