# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of a model's forward that keep its values as they are while it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from torch_cpudist.errors import InternalError
from torch_cpudist.inference.shared_lock import Share, SharedLock


def _source_of(module: str) -> str:
    """The file of a module that is not imported yet, as importing it would take long.

    Raises:
        InternalError: there is none of that name.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise InternalError(f"{module}, whose frames are to be passed over, is gone")
    return spec.origin


# Where frames are between whoever calls a hook and what the hook does: files, and a
# folder with all that is in it.
BETWEEN = (
    __file__,
    _source_of("torch_cpudist.tables.graphs"),
    os.path.join(os.path.dirname(_source_of("torch._dynamo")), ""),
)


class _Hook:
    """Calls one method of a guard; nothing in copies and saved models."""

    def __init__(self, call: Callable[[bool], None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            from torch_cpudist.tables import graphs  # which imports the compiler

            graphs.outside(self._call, True)
        else:
            self._call(False)

    def __reduce__(self) -> Any:
        # Of the standard library: a saved model loads without this package.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ForwardGuard:
    """Every forward of a model shares a lock until it ends, whatever ends it.

    torch calls hooks behind a forward that has returned, or raised an ``Exception``:
    not behind a ``KeyboardInterrupt``, and in compiled code behind no error. Each share
    therefore knows the frame that called the hook before the forward, and ends with it.
    """

    def __init__(self, model: nn.Module, lock: SharedLock) -> None:
        """Hooks ``model``."""
        self._lock = lock
        self._own = threading.local()
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._enter), prepend=True),
            model.register_forward_hook(_Hook(self._leave), always_call=True),
        ]

    def _enter(self, compiled: bool) -> None:
        under_way = self._under_way()
        share = self._lock.enter(_caller())
        under_way.append((share, compiled))

    def _leave(self, compiled: bool) -> None:
        under_way = self._under_way()
        if not under_way:
            return
        share, was_compiled = under_way[-1]
        # A hook of somebody else that raised before ours has left it without a share:
        # the last one is of a forward around this one. In compiled code, frames go on
        # in others, and only the order tells.
        if share.frame is _caller() or was_compiled or compiled:
            under_way.pop()
            self._lock.leave(share)

    def _under_way(self) -> list[tuple[Share, bool]]:
        """Forwards of this thread, the innermost last, without those that ended."""
        found: list[tuple[Share, bool]] | None
        found = getattr(self._own, "under_way", None)
        if found is None:
            found = self._own.under_way = []
        while found and (not found[-1][0].held or found[-1][0].ended):
            self._lock.leave(found.pop()[0])
        return found

    @staticmethod
    def holds(module: nn.Module) -> bool:
        """Whether a module's forwards are guarded."""
        return any(isinstance(one, _Hook) for one in module._forward_pre_hooks.values())

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()


def _caller() -> FrameType | None:
    """The frame that has called the hook, which lasts as long as the forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _passed(frame.f_code):
        frame = frame.f_back
    return frame


def _passed(code: CodeType) -> bool:
    # A generator's frame stays when it is left, and must never be cleared.
    pauses = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return bool(code.co_flags & pauses) or code.co_filename.startswith(BETWEEN)
