# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""State from before the first step, which trainers do not hold while servers do.

torch's Adagrad fills an accumulator of every parameter before its first step. Servers
keep their own, so that a trainer would hold another one of every table for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from torch_cpudist.served.state_exchange import has_stepped

_ZEROS = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class _Filled:
    """A tensor of one value."""

    like: torch.Tensor  # without memory
    device: torch.device
    value: float
    shared: bool  # one value's memory stands for all, as of remote tables

    @property
    def needs_memory(self) -> bool:
        """Whether making it again fills memory; the kernel's zeros need none."""
        if self.shared:
            return False
        plain = self.device.type == "cpu" and self.like.is_contiguous()
        zero = self.value == 0 and math.copysign(1, self.value) > 0
        return not (plain and zero and self.like.dtype in _ZEROS)

    def made(self) -> torch.Tensor:
        if self.shared:
            one = torch.full((), self.value, dtype=self.like.dtype, device=self.device)
            return one.expand(self.like.shape)
        if self.needs_memory:
            return torch.full_like(self.like, self.value, device=self.device)
        # torch would write the zeros; these pages come with the first write to them.
        zeros = np.zeros(tuple(self.like.shape), _ZEROS[self.like.dtype])
        return torch.from_numpy(zeros)


def _described(value: Any) -> Any:
    """What ``value`` can be made of again without its memory; else itself.

    Counts and the like stay: they need no memory to speak of.
    """
    if not isinstance(value, torch.Tensor) or value.numel() <= 1:
        return value
    if value.layout is not torch.strided or not value.is_floating_point():
        return value
    # May stand for more than can be read. Of one column torch keeps a stride of 1.
    sizes = zip(value.shape, value.stride(), strict=True)
    shared = not any(stride for size, stride in sizes if size > 1)
    seen = value[(0,) * value.dim()] if shared else value
    low, high = (bound.item() for bound in torch.aminmax(seen.detach()))
    if low != high:
        return value
    return _Filled(torch.empty_like(value, device="meta"), value.device, low, shared)


class InitialState:
    """Initial state of served parameters, taken out of optimizers. Not thread-safe.

    State of optimizers that have stepped stays with them: nobody could make it again
    for ``close()``. No messages.
    """

    def __init__(
        self, inners: Sequence[Optimizer], served: Iterable[torch.Tensor]
    ) -> None:
        """Takes the initial state of ``served`` out of ``inners``."""
        self._taken: list[tuple[Optimizer, torch.Tensor, Mapping[str, Any]]] = []
        for parameter in served:
            for inner in inners:
                state = inner.state.get(parameter)
                if not state or has_stepped(state):
                    continue
                described = {name: _described(value) for name, value in state.items()}
                self._taken.append((inner, parameter, described))
                del inner.state[parameter]

    def forget_large(self, parameters: Container[int]) -> None:
        """Forgets state that would fill memory: it is not made again.

        Args:
            parameters: ``id`` of those whose values do not come home either.
        """
        self._taken = [
            (inner, parameter, described)
            for inner, parameter, described in self._taken
            if id(parameter) not in parameters
            or not any(
                isinstance(value, _Filled) and value.needs_memory
                for value in described.values()
            )
        ]

    def give_back(self) -> None:
        """Makes the state again where there is no other. Idempotent.

        Zeros, which torch's Adagrad begins with, take memory only once written to.
        """
        for inner, parameter, described in self._taken:
            if parameter not in inner.state:
                inner.state[parameter] = {
                    name: value.made() if isinstance(value, _Filled) else value
                    for name, value in described.items()
                }
        self._taken.clear()
