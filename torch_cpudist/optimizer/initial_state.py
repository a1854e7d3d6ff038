# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""State from before the first step, which trainers do not hold while servers do.

torch's Adagrad fills an accumulator of every parameter before its first step. Servers
keep their own, so that a trainer would hold another one of every table for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torch_cpudist.served.state_exchange import has_stepped


@dataclass(frozen=True)
class _Filled:
    """A tensor of one value."""

    like: torch.Tensor  # without memory
    device: torch.device
    value: float

    def made(self) -> torch.Tensor:
        return torch.full_like(self.like, self.value, device=self.device)


def _described(value: Any) -> Any:
    """What ``value`` can be made of again without its memory; else itself.

    Counts and the like stay: they need no memory to speak of.
    """
    if not isinstance(value, torch.Tensor) or value.numel() <= 1:
        return value
    if value.layout is not torch.strided or not value.is_floating_point():
        return value
    low, high = (bound.item() for bound in torch.aminmax(value.detach()))
    if low != high:
        return value
    return _Filled(torch.empty_like(value, device="meta"), value.device, low)


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

    def give_back(self) -> None:
        """Makes the state again where there is no other. Idempotent."""
        for inner, parameter, described in self._taken:
            if parameter not in inner.state:
                inner.state[parameter] = {
                    name: value.made() if isinstance(value, _Filled) else value
                    for name, value in described.items()
                }
        self._taken.clear()
