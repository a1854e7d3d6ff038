# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of tables that say what to do where torch has no operation for them.

torch's gradient clipping dies on a sparse gradient, with a list of all its backends.
Nothing of torch is changed to name what clips here: until an optimizer's first step the
gradients of its tables are of a class of their own. A loop that clips does so in its
first step, so that the others cost nothing: some 40 microseconds for each table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from torch_cpudist.errors import SparseGradientError
from torch_cpudist.tables.found import FoundTable

# What makes another tensor of the same class: here a plain one.
_COPIES = ("__deepcopy__", "__reduce_ex__", "__repr__", "clone")


class TableGradient(torch.Tensor):
    """A sparse gradient that knows its table; results of operations are plain."""

    _cpudist_table_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs torch's function.

        Raises:
            SparseGradientError: torch has none for sparse tensors.
        """
        with torch._C.DisableTorchFunctionSubclass():
            name = getattr(func, "__name__", repr(func))
            if name in _COPIES and isinstance(args[0], TableGradient):
                args = (args[0].detach(), *args[1:])
            try:
                return func(*args, **(kwargs or {}))
            except NotImplementedError:
                tables = [repr(one._cpudist_table_name) for one in _tables_of(args)]
                raise SparseGradientError(
                    f"table {', '.join(tables)}: torch has no {name} of a sparse "
                    "gradient. To clip gradients of a model with tables: "
                    "DistributedOptimizer(..., clip=cpudist.ClipNorm(max_norm)) or "
                    "ClipValue(value), which clip the averaged gradient (leave "
                    "Lightning's gradient_clip_val at None), or "
                    "cpudist.clip_grad_norm_, which clips the trainer's own."
                ) from None


def _tables_of(arguments: Iterable[Any]) -> Iterator[TableGradient]:
    """The gradients of tables among arguments of torch, lists of tensors included."""
    for one in arguments:
        if isinstance(one, TableGradient):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tables_of(one)


class FirstGradients:
    """Marks the gradients of tables until the first step. Not thread-safe."""

    def __init__(self, tables: Iterable[FoundTable]) -> None:
        """Begins to mark those of ``tables``."""
        self._names = {id(table.weight): table.name for table in tables}
        self._hooks: list[RemovableHandle] = [
            table.weight.register_post_accumulate_grad_hook(self.mark)  # type: ignore[no-untyped-call]
            for table in tables
        ]

    def mark(self, weight: torch.Tensor) -> None:
        """Makes the gradient of ``weight`` one that knows its table; the same memory.

        For backward, which calls it when the gradient is there.
        """
        grad = weight.grad
        if grad is None or not grad.is_sparse or isinstance(grad, TableGradient):
            return
        made: Any = torch.Tensor._make_subclass(TableGradient, grad)
        made._cpudist_table_name = self._names[id(weight)]
        weight.grad = made

    def end(self) -> None:
        """Marks none any more. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
