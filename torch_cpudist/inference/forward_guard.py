# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of a model's forward that keep its values as they are while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_cpudist.inference.shared_lock import SharedLock


class _Hook:
    """Calls one method of a lock; nothing in copies and saved models."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            from torch_cpudist.tables import graphs  # which imports the compiler

            graphs.outside(self._call)
        else:
            self._call()

    def __reduce__(self) -> Any:
        # Of the standard library: a saved model loads without this package.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ForwardGuard:
    """Every forward of a model shares a lock, also one that raises."""

    def __init__(self, model: nn.Module, lock: SharedLock) -> None:
        """Hooks ``model``."""
        self._handles = [
            model.register_forward_pre_hook(_Hook(lock.enter), prepend=True),
            model.register_forward_hook(_Hook(lock.leave), always_call=True),
        ]

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
