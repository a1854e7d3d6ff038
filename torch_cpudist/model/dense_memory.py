# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Dense parameters and their gradients as the client takes them: host addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from torch_cpudist.errors import ModelChangedError
from torch_cpudist.machine import staging
from torch_cpudist.model.gradients import read_dense_gradient
from torch_cpudist.model.placement import DenseParameter

# Where parameters begin in staging memory: a cache line.
_ALIGNED_BYTES = 64

# Index of a dense parameter, and its gradient in host memory.
HostGradients = list[tuple[int, torch.Tensor]]


def check_kept(dense: Sequence[DenseParameter]) -> None:
    """Refuses parameters that are no longer what they were when placed.

    Raises:
        ModelChangedError: a parameter has another shape, dtype or device.
    """
    for entry in dense:
        found = entry.parameter
        kind = (found.dtype, found.shape, found.device)
        if kind != (entry.dtype, entry.shape, entry.device):
            raise ModelChangedError(
                f"parameter {entry.name!r} is now {tuple(found.shape)} {found.dtype} "
                f"on {found.device}, expected {tuple(entry.shape)} {entry.dtype} on "
                f"{entry.device} as when its optimizer was wrapped. Convert or move a "
                "model before that."
            )


class Weights:
    """Addresses that the client writes dense values to.

    A parameter that is not contiguous gets a staging copy, written back on exit.
    """

    def __init__(self, dense: Sequence[DenseParameter]) -> None:
        check_kept(dense)
        self.addresses: list[int] = []
        self._staged: list[tuple[nn.Parameter, torch.Tensor]] = []
        for entry in dense:
            target = entry.parameter.detach()
            if not target.is_contiguous():
                target = target.contiguous()
                self._staged.append((entry.parameter, target))
            self.addresses.append(target.data_ptr())

    def __enter__(self) -> list[int]:
        return self.addresses

    def __exit__(self, *_: object) -> None:
        # Also after an interrupt: the copies hold old values or new ones.
        for parameter, target in self._staged:
            parameter.data.copy_(target)


class DenseMemory(ABC):
    """Dense parameters of one parameter set. Not thread-safe."""

    def __init__(self, dense: Sequence[DenseParameter]) -> None:
        """Of the parameters ``dense``."""
        self._entries = list(dense)

    @abstractmethod
    def gradients(self) -> HostGradients:
        """The gradients that there are, contiguous.

        Raises:
            UnsupportedModelError: one is not what it must be.
        """

    @abstractmethod
    def weights(self) -> AbstractContextManager[list[int]]:
        """Addresses to write values to, by index; on exit they are the parameters'.

        Raises:
            ModelChangedError: see ``check_kept``.
        """

    def check_kept(self) -> None:
        """See ``check_kept`` of this module."""
        check_kept(self._entries)

    def _own(self) -> HostGradients:
        return [
            (
                i,
                read_dense_gradient(entry.name, entry.parameter.grad, entry.dtype),
            )
            for i, entry in enumerate(self._entries)
            if entry.parameter.grad is not None
        ]


class InPlace(DenseMemory):
    """Parameters on the CPU: the client reads and writes their own memory."""

    def gradients(self) -> HostGradients:
        """``grad`` itself, where it is contiguous."""
        return self._own()

    def weights(self) -> AbstractContextManager[list[int]]:
        """The parameters themselves, where they are contiguous."""
        return Weights(self._entries)


class Staged(DenseMemory):
    """Parameters on a device: one copy of all gradients to the host, one of all values.

    Memory: two of all parameters on the host, of which one holds the values that the
    servers sent last, and one on the device, used by both copies in turn.
    """

    def __init__(self, dense: Sequence[DenseParameter], device: torch.device) -> None:
        """Of parameters that are all on ``device``."""
        super().__init__(dense)
        self._device = device
        spans, end = [], 0
        for entry in dense:
            size_bytes = entry.shape.numel() * entry.dtype.itemsize
            spans.append((end, end + size_bytes))
            end += -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._spans = spans
        self._values = staging.host_memory((end,), torch.uint8, device)
        self._grads = staging.host_memory((end,), torch.uint8, device)
        self._carrier = torch.empty(end, dtype=torch.uint8, device=device)
        self._value_views = self._views(self._values)
        self._grad_views = self._views(self._grads)
        self._carried = self._views(self._carrier)
        self._under_way = staging.Arrival(device)
        # A reply brings the values that were updated: the others stay as they are here.
        for view, entry in zip(self._value_views, dense, strict=True):
            view.copy_(entry.parameter.detach())

    def _views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [
            memory[begin:end].view(entry.dtype).view(entry.shape)
            for (begin, end), entry in zip(self._spans, self._entries, strict=True)
        ]

    def gradients(self) -> HostGradients:
        """Copies all gradients to the host, and waits until they are there."""
        found = self._own()
        if not found:
            return []
        self._under_way.wait()
        torch._foreach_copy_(
            [self._carried[i] for i, _ in found], [g for _, g in found]
        )
        self._grads.copy_(self._carrier, non_blocking=True)
        arrival = staging.Arrival(self._device)
        arrival.note()
        arrival.wait()
        return [(i, self._grad_views[i]) for i, _ in found]

    @contextmanager
    def weights(self) -> Iterator[list[int]]:
        """Host memory with the values of before; on exit its copying has begun."""
        self.check_kept()
        self._under_way.wait()
        try:
            yield [view.data_ptr() for view in self._value_views]
        finally:
            # Also after an interrupt: this holds old values or new ones.
            self._put()

    def _put(self) -> None:
        if not self._entries:
            return
        self._carrier.copy_(self._values, non_blocking=True)
        torch._foreach_copy_(
            [entry.parameter.data for entry in self._entries], self._carried
        )
        self._under_way = staging.Arrival(self._device)
        self._under_way.note()


def dense_memory(dense: Sequence[DenseParameter], device: torch.device) -> DenseMemory:
    """What the client reads and writes in the place of ``dense``, on ``device``."""
    return Staged(dense, device) if staging.needed(device) else InPlace(dense)
