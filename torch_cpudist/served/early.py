# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sends dense gradients while backward still computes others.

Servers behind a network keep them until the push of the step says which of them are
still what they were, so that results never depend on what went early. Where gradients
change between backward and step, as with accumulation over several backwards or
clipping by the user's own hand, they travel twice, and those that are taken away for
nothing: that is noticed, and nothing goes early for a while, which doubles each time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from torch_cpudist import _core
from torch_cpudist.errors import (
    ClosedError,
    FencedError,
    OperationTimeoutError,
    PeerLostError,
)
from torch_cpudist.model.placement import DenseParameter

# What is worth a frame of its own.
LEAST_BYTES = 128 << 10
FIRST_REST, _LONGEST_REST = 32, 4096  # steps


class EarlyPushes:
    """The dense gradients of one parameter set, on their way before its pushes.

    Cost: a copy of each gradient that goes, a frame per 128 KiB or parameter and
    server, and a comparison with the copy at the step.

    Thread safety: gradients may be ready on any thread; the rest is called by the one
    that steps.
    """

    def __init__(
        self, opened: Callable[[], _core.ParamSet], dense: Sequence[DenseParameter]
    ) -> None:
        """Waits for the gradients of ``dense``, which are on the CPU.

        Args:
            opened: the set, as it is open now.
            dense: its dense parameters.
        """
        self._opened = opened
        self._lock = threading.Lock()
        self._ready: list[tuple[int, torch.Tensor]] = []
        self._ready_bytes = 0
        self._rest, self._next_rest = 0, FIRST_REST
        self._counted = (0, 0)
        self._hooks = [
            entry.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._computed, entry)
            )
            for entry in dense
            if entry.parameter.requires_grad
        ]

    def _computed(self, entry: DenseParameter, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if self._rest == 0 and grad is not None and _as_it_goes(grad, entry):
            self._take(entry.index, grad.detach())

    def _take(self, index: int, grad: torch.Tensor) -> None:
        with self._lock:
            self._ready.append((index, grad))
            self._ready_bytes += grad.nbytes
            if self._ready_bytes < LEAST_BYTES:
                return
            going, self._ready, self._ready_bytes = self._ready, [], 0
            addresses = [(index, grad.data_ptr()) for index, grad in going]
            # What a server or its link has failed with, the push says, in ``step``,
            # where scripts look for it.
            try:
                self._opened().push_early(addresses)
            except (ClosedError, FencedError, OperationTimeoutError, PeerLostError):
                self._rest = _LONGEST_REST

    def stepped(self) -> None:
        """A push has gone: gradients from now on are the next step's."""
        with self._lock:
            self._ready, self._ready_bytes = [], 0
        sent, changed = self._opened().early_bytes()
        before_sent, before_changed = self._counted
        self._counted = (sent, changed)
        if self._rest > 0:
            self._rest -= 1
        elif changed > before_changed:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        elif sent > before_sent:
            self._next_rest = FIRST_REST

    def close(self) -> None:
        """Waits for no gradients any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _as_it_goes(grad: torch.Tensor, entry: DenseParameter) -> bool:
    """Whether a gradient is pushed from where it lies."""
    return (
        grad.layout == torch.strided
        and grad.dtype == entry.dtype
        and grad.device.type == "cpu"
        and grad.is_contiguous()
        and not grad.is_neg()
        and grad.shape == entry.shape
    )
