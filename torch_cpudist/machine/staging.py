# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Values between host memory, where servers reach them, and the model's device.

Memory that is copied to or from a CUDA device is pinned, so that the copy runs beside
the host. torch's allocator of pinned memory does not give a block out again before the
copies that read or write it have ended; whoever *reads* what was copied to the host
waits for its ``Arrival``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable


def needed(device: torch.device) -> bool:
    """Whether values have to be copied between host memory and ``device``."""
    return device.type != "cpu"


def host_memory(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uninitialised host memory for copies to or from ``device``."""
    pinned = device.type == "cuda"
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


class Arrival:
    """Copies between host and device that are under way, until they have ended.

    Thread safety: ``note`` and ``wait`` from any thread; a copy is waited for by every
    ``wait`` that begins after its ``note``.
    """

    def __init__(self, device: torch.device) -> None:
        """Of copies to or from ``device``."""
        self.device = device
        self._events: list[torch.cuda.Event] = []

    def note(self) -> None:
        """What was begun on the current stream of the device is under way."""
        if self.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            self._events.append(event)

    def wait(self) -> None:
        """Returns when all that was noted has ended."""
        for event in tuple(self._events):
            event.synchronize()


def sparse_gradient(
    ids: torch.Tensor, values: torch.Tensor, rows: int, padding_idx: int | None
) -> torch.Tensor:
    """The gradient of a weight of so many rows, as torch's lookups make it.

    Args:
        ids: int64 ``[n]``, duplicates allowed.
        values: ``[n, dim]``; aliased by the result unless rows of padding are left out.
        rows: of the weight.
        padding_idx: the row that gets no gradient, if any.
    """
    if padding_idx is not None:
        kept = ids != padding_idx
        ids, values = ids[kept], values[kept]
    size = (rows, values.shape[1])
    return torch.sparse_coo_tensor(ids[None], values, size, check_invariants=False)


Gather = Callable[[torch.Tensor, torch.Tensor], None]


class _Gather(torch.autograd.Function):
    """Rows of a weight, gathered into staging memory."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        ids: torch.Tensor,
        padding_idx: int | None,
        arrival: Arrival,
        gather: Gather | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_idx, ctx.arrival = weight.shape[0], padding_idx, arrival
        flat = ids.reshape(-1)
        shape = (flat.numel(), weight.shape[1])
        staged = host_memory(shape, weight.dtype, arrival.device)
        if gather is None:
            torch.index_select(weight, 0, flat, out=staged)
        else:
            gather(flat, staged)
        return staged.view(*ids.shape, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.arrival.wait()
        (ids,) = ctx.saved_tensors
        flat = ids.reshape(-1).to(torch.int64)
        values = grad.reshape(flat.numel(), grad.shape[-1])
        found = sparse_gradient(flat, values, ctx.rows, ctx.padding_idx)
        return found, None, None, None, None


class _Stage(torch.autograd.Function):
    """A tensor of the host, copied into staging memory."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        ctx.arrival = arrival
        return host_memory(found.shape, found.dtype, arrival.device).copy_(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.arrival.wait()
        return grad, None


class _ToDevice(torch.autograd.Function):
    """Staging memory, copied to the device; its gradient, begun to be copied back.

    Its backward runs on autograd's thread of the device and does not wait, so that the
    gradients of several lookups travel while others are computed. ``_Gather`` and
    ``_Stage`` wait, on the thread that called backward, before anybody reads them.
    """

    @staticmethod
    def forward(ctx: Any, staged: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        ctx.arrival = arrival
        made = torch.empty(staged.shape, dtype=staged.dtype, device=arrival.device)
        return made.copy_(staged, non_blocking=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        arrival = ctx.arrival
        landed = host_memory(grad.shape, grad.dtype, arrival.device)
        landed.copy_(grad, non_blocking=True)
        arrival.note()
        if torch.is_anomaly_enabled():
            arrival.wait()  # autograd reads it at once
        return landed, None


def rows_on(
    device: torch.device,
    weight: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int | None,
    gather: Gather | None = None,
) -> torch.Tensor:
    """Rows of a weight on the CPU, on ``device``: one copy there and one back.

    Args:
        device: where the result is.
        weight: ``[rows, dim]``, on the CPU.
        ids: int32 or int64, any shape, on the CPU, all of them rows.
        padding_idx: the row that gets no gradient, if any.
        gather: writes the rows of flat ids to host memory, where they are not in the
            weight.

    Returns:
        ``[*ids.shape, dim]``; the weight gets a sparse gradient, in host memory that
        holds it when autograd passes it on.
    """
    arrival = Arrival(device)
    staged = _Gather.apply(weight, ids, padding_idx, arrival, gather)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, _ToDevice.apply(staged, arrival))  # type: ignore[no-untyped-call]


def moved_to(device: torch.device, found: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU, on ``device``: one copy there, and one of its gradient."""
    arrival = Arrival(device)
    staged = _Stage.apply(found, arrival)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, _ToDevice.apply(staged, arrival))  # type: ignore[no-untyped-call]
