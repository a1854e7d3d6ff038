# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The bound tables of this process, and the dispatcher ops that compiled models call.

A graph cannot hold a Python object, so it names a table by its handle; a negative one
stands for a table whose module was given another weight.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torch_cpudist import _core
from torch_cpudist.errors import (
    ClosedError,
    IdTypeError,
    ModelChangedError,
    UnsupportedModelError,
)
from torch_cpudist.log import logger
from torch_cpudist.model.staging import CPU, sparse_gradient

_handles = itertools.count(1)
_bindings: weakref.WeakValueDictionary[int, TableBinding] = (
    weakref.WeakValueDictionary()
)


def model_changed(names: list[str]) -> ModelChangedError:
    """The error for parameters that somebody else wrote."""
    return ModelChangedError(
        f"{len(names)} parameters were written outside the optimizer since its last "
        f"step (first: {names[0]!r}). The servers hold the truth and would overwrite "
        "them: load weights before wrapping the optimizer, or call opt.store_model() "
        "on every trainer to send trainer 0's values to the servers, or "
        "opt.flush(overwrite=True) to drop what was written."
    )


def weight_replaced(name: str) -> ModelChangedError:
    """The error for a table whose module has another parameter as weight by now."""
    return ModelChangedError(
        f"table {name!r}: its module's weight is another parameter than the one that "
        "its optimizer trains. load_state_dict(assign=True) replaces parameters: load "
        "without assign and call opt.store_model(), or close() the "
        "DistributedOptimizer and build the optimizers anew."
    )


def graph_without_pull(name: str) -> UnsupportedModelError:
    """The error for a graph of torch.jit, which would read rows as they stand."""
    return UnsupportedModelError(
        f"table {name!r}: torch.jit.trace and torch.jit.script cannot record that a "
        "lookup brings its rows from the servers. opt.flush(), then trace or script "
        "copy.deepcopy(model), which is a plain model; or close() the optimizer first."
    )


def check_kind(name: str, ids: torch.Tensor) -> None:
    """Checks what looks rows of the table ``name`` up, but not its range.

    Raises:
        IdTypeError: they are not int64 or int32.
        UnsupportedModelError: they are not on the CPU.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise IdTypeError(
            f"table {name!r}: ids must be int64 or int32, got {ids.dtype}. Use "
            "ids.long()."
        )
    if ids.device.type != "cpu":
        raise UnsupportedModelError(
            f"table {name!r}: ids must be on the CPU, or on the CUDA device that the "
            f"model's parameters are on, got {ids.device}. Use ids.cpu()."
        )


class TableBinding:
    """One table of one open parameter set: where its rows come from and go to.

    Thread safety: any thread; lookups of one table take turns.
    """

    def __init__(
        self,
        client: _core.Client,
        param_set: int,
        table: int,
        name: str,
        weight: nn.Parameter,
        versions: Mapping[int, int],
        device: torch.device = CPU,
        home: torch.device = CPU,
    ) -> None:
        """Binds ``weight`` as the cache of the table's rows.

        Args:
            client: the trainer's client.
            param_set: id of the open parameter set.
            table: index of the table in its layout.
            name: name for messages.
            weight: float32 ``[rows, dim]``, contiguous.
            versions: by ``id`` of a parameter, its version after our last write.
            device: where results of lookups are.
            home: where the weight is when its optimizer is not wrapped.
        """
        self.device = device
        self.home = home
        # Another device that the model went to since.
        self.moved_to: torch.device | None = None
        self.client: _core.Client | None = client
        self.param_set = param_set
        self.table = table
        self.name = name
        self.weight = weight
        self._versions = versions
        self.handle = next(_handles)
        self._shape = weight.shape
        self._address: int | None = None  # 0 of a table without rows
        self._bind_lock = threading.Lock()
        self._warned = False
        # Whether rows here may be older than this trainer's last step.
        self.stale = True
        self.bind_weight(client)
        _bindings[self.handle] = self

    def bind_weight(self, client: _core.Client) -> None:
        """Tells the client where the weight's memory is, if it has moved.

        Raises:
            ModelChangedError: the weight is no longer what the servers hold.
        """
        if self.weight.data_ptr() == self._address:
            return
        # Twice would forget the rows that another lookup pulled in between.
        with self._bind_lock:
            self._bind(client)

    def _bind(self, client: _core.Client) -> None:
        weight = self.weight
        address = weight.data_ptr()
        if address == self._address:
            return
        fits = weight.dtype == torch.float32 and weight.device.type == "cpu"
        if not fits or weight.shape != self._shape or not weight.is_contiguous():
            raise ModelChangedError(
                f"table {self.name!r} is now {tuple(weight.shape)} {weight.dtype} on "
                f"{weight.device}; expected contiguous float32 {tuple(self._shape)} on "
                "the CPU, as when its optimizer was wrapped. Convert or move a model "
                "before that."
            )
        client.bind_table(self.param_set, self.table, address)
        self._address = address

    def forget_rows(self, client: _core.Client) -> None:
        """Makes the client pull every row again: somebody else wrote the weight."""
        self._address = None
        self.bind_weight(client)

    def warn_if_stale(self) -> None:
        """Warns, once, before the weight is saved or copied with rows that are old."""
        if self.stale and self.client is not None and not self._warned:
            self._warned = True
            logger.warning(
                "table %r is saved or copied while rows of it are older than the last "
                "step. Call opt.flush() before.",
                self.name,
            )

    def check_weight(self, weight: torch.Tensor) -> None:
        """Refuses a weight that took the place of the bound one.

        Raises:
            ModelChangedError: rows would come into one tensor and be read in another,
                whose gradients no optimizer sees.
        """
        if weight is not self.weight:
            raise weight_replaced(self.name)

    def pull(self, ids: torch.Tensor, weight: torch.Tensor) -> None:
        """Makes the rows of ``ids`` current in the weight.

        Args:
            ids: int32 or int64, any shape, on the CPU or the model's device.
            weight: what the module looks up.

        Raises:
            RowOutOfRangeError: an id is negative or at least ``rows``.
            ModelChangedError: the weight was written, replaced, converted or moved by
                others.
            PeerLostError, OperationTimeoutError: a server does not answer.
            ClosedError: the optimizer was closed.
            IdTypeError: ``ids`` are of another type.
            UnsupportedModelError: torch.jit is tracing; ids on another device.
        """
        if torch._C._is_tracing():
            raise graph_without_pull(self.name)
        client = self.client
        if client is None:
            raise ClosedError(
                f"table {self.name!r}: its DistributedOptimizer is closed. Wrap the "
                "optimizer again, or use the model's own modules."
            )
        self.check_weight(weight)
        flat = self.checked_ids(ids)
        if flat.numel() == 0:
            return
        self.bind_weight(client)
        client.pull(
            self.param_set,
            self.table,
            flat.data_ptr(),
            flat.numel(),
            flat.dtype == torch.int32,
        )

    def _check_unwritten(self) -> None:
        if self.weight._version > self._versions.get(id(self.weight), -1):
            # A pull would overwrite what was written, a loaded model say.
            raise model_changed([self.name])

    def checked_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Checks what a lookup or a prefetch is given, but not its range.

        Returns:
            The ids, contiguous.

        Raises:
            ModelChangedError: the weight was written by others.
            IdTypeError: they are not int64 or int32.
            UnsupportedModelError: they are neither on the CPU nor the model's device.
        """
        self._check_unwritten()
        found = self.on_host(ids)
        check_kind(self.name, found)
        return found.contiguous()

    def on_host(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids, copied if they are on the model's device: waits for what it does."""
        there = not ids.is_cpu and ids.device == self.device
        return ids.to(CPU) if there else ids

    def close(self) -> None:
        """Ends the binding; a later lookup through it raises ``ClosedError``."""
        self.client = None


def _pull(ids: torch.Tensor, handle: int) -> None:
    binding = _bindings.get(abs(handle))
    if binding is None:
        raise ClosedError(
            "this compiled graph looks up a table whose DistributedOptimizer is gone. "
            "Compile the model again after wrapping."
        )
    if handle < 0:
        raise weight_replaced(binding.name)
    binding.pull(ids, binding.weight)


# The results depend on the pull, which orders it before the read without declaring the
# weight mutated, for which a functionalised graph would copy the whole table.
_library = torch.library.Library("torch_cpudist", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "pull(Tensor ids, int handle) -> Tensor",
    "lookup(Tensor weight, Tensor ids, int handle, int padding_idx) -> Tensor",
    "lookup_grad(Tensor grad, Tensor ids, SymInt rows, int padding_idx) -> Tensor",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


def _pull_op(ids: torch.Tensor, handle: int) -> torch.Tensor:
    """Pulls rows; the copy of ``ids`` is what the lookup then uses."""
    _pull(ids, handle)
    return ids.clone()


def _lookup_op(
    weight: torch.Tensor, ids: torch.Tensor, handle: int, padding_idx: int
) -> torch.Tensor:
    """Pulls rows and gathers them."""
    _pull(ids, handle)
    return torch.nn.functional.embedding(ids, weight, padding_idx, sparse=True)


def _lookup_grad_op(
    grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int
) -> torch.Tensor:
    """The sparse gradient of a lookup, over memory of its own.

    torch's own one aliases the upstream gradient, whose memory a graph compiled by
    inductor uses again for other results while the gradient is still needed.
    """
    flat = ids.reshape(-1).to(torch.int64, copy=True)
    values = grad.reshape(flat.numel(), grad.shape[-1]).clone()
    return sparse_gradient(flat, values, rows, padding_idx)


_library.impl("pull", _pull_op, "CPU")  # type: ignore[no-untyped-call]
_library.impl("lookup", _lookup_op, "CPU")  # type: ignore[no-untyped-call]
_library.impl("lookup_grad", _lookup_grad_op, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("torch_cpudist::pull", lib=_library)  # type: ignore[untyped-decorator]
def _pull_fake(ids: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(ids)


@torch.library.register_fake("torch_cpudist::lookup", lib=_library)  # type: ignore[untyped-decorator]
def _lookup_fake(
    weight: torch.Tensor, ids: torch.Tensor, handle: int, padding_idx: int
) -> torch.Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@torch.library.register_fake("torch_cpudist::lookup_grad", lib=_library)  # type: ignore[untyped-decorator]
def _lookup_grad_fake(
    grad: torch.Tensor, ids: torch.Tensor, rows: int, padding_idx: int
) -> torch.Tensor:
    keys = ids.new_empty((1, ids.numel()), dtype=torch.int64)
    values = grad.new_empty((ids.numel(), grad.shape[-1]))
    return torch.sparse_coo_tensor(
        keys, values, (rows, grad.shape[-1]), check_invariants=False
    )


def _save_for_grad(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, ids, _, ctx.padding_idx = inputs
    ctx.save_for_backward(ids)
    ctx.rows = weight.shape[0]


def _lookup_backward(
    ctx: Any, grad: torch.Tensor
) -> tuple[torch.Tensor, None, None, None]:
    (ids,) = ctx.saved_tensors
    result = torch.ops.torch_cpudist.lookup_grad(grad, ids, ctx.rows, ctx.padding_idx)
    return result, None, None, None


torch.library.register_autograd(
    "torch_cpudist::lookup",
    _lookup_backward,
    setup_context=_save_for_grad,
    lib=_library,
)
