# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class, and what is checked of ids and weights for it.
"""The bound tables of this process: where rows of a table come from and go to."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from torch_cpudist import _core, ranges
from torch_cpudist.errors import (
    ClosedError,
    Error,
    IdTypeError,
    InvalidArgumentError,
    ModelChangedError,
    PeerLostError,
    RowOutOfRangeError,
    UnsupportedModelError,
)
from torch_cpudist.log import logger
from torch_cpudist.machine.device import CPU
from torch_cpudist.tables import foreign
from torch_cpudist.tables.weight import as_it_stands

# Rows that are asked for at once for who reads a whole table.
_READ_ROWS = 65_536

_handles = itertools.count(1)
_bindings: weakref.WeakValueDictionary[int, TableBinding] = (
    weakref.WeakValueDictionary()
)

#: Why a module with ``max_norm`` is no table, and what to do.
MAX_NORM_OBSTACLE = (
    "max_norm rewrites rows on the trainer during a lookup, outside the optimizer",
    "Set max_norm=None; to bound norms, scale the looked-up rows in the model.",
)
#: Why one with ``scale_grad_by_freq`` is none.
FREQUENCY_OBSTACLE = "torch has no sparse gradient with scale_grad_by_freq"


def model_changed(
    names: list[str], parameters: Iterable[torch.Tensor]
) -> ModelChangedError:
    """The error for parameters that somebody else wrote.

    Args:
        names: theirs.
        parameters: all that are trained, to find out who that was.
    """
    why = "The"
    if foreign.is_averaged(parameters):
        why = f"They are in a {foreign.averaging_advice()} If others wrote them: the"
    return ModelChangedError(
        f"{len(names)} parameters were written outside the optimizer since its last "
        f"step (first: {names[0]!r}). {why} servers hold the truth and would overwrite "
        "them: load weights before wrapping the optimizer, or call opt.store_model() "
        "on every trainer to send trainer 0's values to the servers, or "
        "opt.flush(overwrite=True) to drop what was written."
    )


def weight_replaced(name: str) -> ModelChangedError:
    """The error for a table whose module has another parameter as weight by now."""
    return ModelChangedError(
        f"table {name!r}: its module's weight is another parameter than the one that "
        "its optimizer trains, or none. load_state_dict(assign=True) replaces "
        "parameters: load without assign and call opt.store_model(), or close() the "
        "DistributedOptimizer and build the optimizers anew."
    )


def no_tensor(name: str, ids: object) -> IdTypeError:
    """The error for a lookup in the table ``name`` of what is no tensor."""
    return IdTypeError(
        f"table {name!r}: ids must be a tensor of int64 or int32, got "
        f"{type(ids).__name__}. Use torch.as_tensor(ids)."
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


class NamedWeight(Protocol):
    """A table, bound or not."""

    name: str
    weight: nn.Parameter


NamedT = TypeVar("NamedT", bound=NamedWeight)
AnswerT = TypeVar("AnswerT")


def bound_ids(
    tables: Sequence[NamedT], ids: Mapping[nn.Module, torch.Tensor]
) -> Iterator[tuple[NamedT, torch.Tensor]]:
    """Yields the table of every module, and its ids.

    Raises:
        InvalidArgumentError: a module is no table of these.
    """
    for module, tensor in ids.items():
        weight = getattr(module, "weight", None)
        found = [table for table in tables if table.weight is weight]
        if not found:
            names = ", ".join(repr(table.name) for table in tables)
            raise InvalidArgumentError(
                f"prefetch: {type(module).__name__} is no table of this optimizer, "
                f"whose tables are {names or 'none'}. Pass the nn.Embedding or "
                "nn.EmbeddingBag with sparse=True itself."
            )
        yield found[0], tensor


def check_rows(
    tables: Sequence[NamedWeight], ids: Mapping[nn.Module, torch.Tensor]
) -> None:
    """Checks ids of tables whose rows are all here, as a pull of them would be.

    Raises:
        InvalidArgumentError: a module is no table of these.
        IdTypeError, UnsupportedModelError: ids of another dtype or device.
        RowOutOfRangeError: an id is no row.
    """
    for table, tensor in bound_ids(tables, ids):
        check_kind(table.name, tensor)
        if tensor.numel() == 0:
            continue
        rows = len(table.weight)
        low, high = (int(bound) for bound in torch.aminmax(tensor))
        if low < 0 or high >= rows:
            raise RowOutOfRangeError(
                f"table {table.name!r}: id {low if low < 0 else high} is outside its "
                f"{rows} rows; ids must be in [0, {rows})"
            )


class TableBinding:
    """One table of one open parameter set: where its rows come from and go to.

    Thread safety: any thread; lookups of one table take turns.

    Attributes:
        remote: whether no row is ever in the weight.
    """

    remote: bool = False

    def __init__(
        self,
        param_set: _core.ParamSet | None,
        table: int,
        name: str,
        weight: nn.Parameter,
        versions: Mapping[int, int],
        device: torch.device = CPU,
        home: torch.device = CPU,
        exact: bool = True,
    ) -> None:
        """Binds ``weight`` as the cache of the table's rows.

        Args:
            param_set: the open parameter set; ``None`` where rows come from elsewhere.
            table: index of the table in its layout.
            name: name for messages.
            weight: float32 ``[rows, dim]``, contiguous.
            versions: by ``id`` of a parameter, its version after our last write.
            device: where results of lookups are.
            home: where the weight is when its optimizer is not wrapped.
            exact: whether lookups bring rows as the servers have them.
        """
        self.exact = exact
        self.device = device
        self.home = home
        # Another device that the model went to since.
        self.moved_to: torch.device | None = None
        self.param_set: _core.ParamSet | None = param_set
        # Called with what a call on the set has failed with; returns when it is to be
        # asked again, of the set that is bound then.
        self.outlive: Callable[[Error, _core.ParamSet], None] | None = None
        # Of each lookup: this table, its ids, and how many of their rows it asked for.
        self.told: Callable[[int, torch.Tensor, int], None] | None = None
        self.table = table
        self.name = name
        self.weight = weight
        self._versions = versions
        self.handle = next(_handles)
        self._shape = weight.shape
        self._address: int | None = None  # 0 of a table without rows
        self._bind_lock = threading.Lock()
        self._warned = False
        self._stale = True
        # Whether others may have stepped since rows were read, and this trainer not.
        self._aged = False
        self._steps = 0
        if param_set is not None:
            self.bind_weight(param_set)
        _bindings[self.handle] = self

    def lasting(self, ask: Callable[[_core.ParamSet], AnswerT]) -> AnswerT:
        """What the open set answers, or the one that takes its place.

        Raises:
            ClosedError: the optimizer was closed.
            Error: as ``ask``, where the servers are not to be outlived.
        """
        while True:
            param_set = self._opened()
            try:
                return ask(param_set)
            except (PeerLostError, ClosedError) as error:
                if self.outlive is None:
                    raise
                self.outlive(error, param_set)

    def bind_weight(self, param_set: _core.ParamSet) -> None:
        """Tells the set where the weight's memory is, if it has moved.

        Raises:
            ModelChangedError: the weight is no longer what the servers hold.
        """
        with as_it_stands():
            if self.weight.data_ptr() == self._address:
                return
        # Twice would forget the rows that another lookup pulled in between.
        with self._bind_lock, as_it_stands():
            self._bind(param_set)

    def _bind(self, param_set: _core.ParamSet) -> None:
        weight = self.weight
        address = weight.data_ptr()
        if address == self._address:
            return
        fits = weight.dtype == torch.float32 and weight.device.type == "cpu"
        fits = fits and not weight.is_neg()  # whose memory has the other sign
        if not fits or weight.shape != self._shape or not weight.is_contiguous():
            raise ModelChangedError(
                f"table {self.name!r} is now {tuple(weight.shape)} {weight.dtype} on "
                f"{weight.device}; expected contiguous float32 {tuple(self._shape)} on "
                "the CPU, as when its optimizer was wrapped. Convert or move a model "
                "before that."
            )
        param_set.bind_table(self.table, address)
        self._address = address

    def forget_rows(self, param_set: _core.ParamSet) -> None:
        """Makes the set pull every row again: somebody else wrote the weight."""
        self._address = None
        self.bind_weight(param_set)

    @property
    def stale(self) -> bool:
        """Whether rows here may be older than this trainer's last step."""
        return self._stale

    @stale.setter
    def stale(self, stale: bool) -> None:
        with self._bind_lock:
            self._stale = stale
            self._aged = self._aged and stale
            self._steps += 1

    def age(self) -> None:
        """Notes that other trainers may have stepped since this one's last step."""
        with self._bind_lock:
            self._aged = True
            self._steps += 1

    def read(self, keys: torch.Tensor | None = None) -> None:
        """Brings in rows for who reads the weight itself, not through a lookup.

        Not where somebody else wrote it: what was written is what is read. A gradient
        of rows that no lookup has pulled is refused as before.

        Args:
            keys: distinct int64 rows, on the CPU; all by default.

        Raises:
            PeerLostError, OperationTimeoutError: a server does not answer.
        """
        param_set = self.param_set
        if param_set is None:
            return
        # Whoever has left is not told when others step.
        if not (self._stale or self._aged) and param_set.is_member():
            return
        with as_it_stands():
            if self._written() or self.weight.data_ptr() != self._address:
                return
            rows = self._shape[0]
        steps = self._steps
        if keys is not None:
            self._read_rows(keys)
            return
        self._tell_of_reading(rows)
        for begin in range(0, rows, _READ_ROWS):
            some = torch.arange(begin, min(begin + _READ_ROWS, rows), device="cpu")
            self._read_rows(some)
        with self._bind_lock:
            # A lookup brings rounded rows again where pulls are rounded.
            if self._steps == steps and self.exact:
                self._stale = self._aged = False

    def _read_rows(self, keys: torch.Tensor) -> None:
        with ranges.of(ranges.PULL):
            self.lasting(
                lambda opened: opened.read_rows(
                    self.table, keys.data_ptr(), keys.numel()
                )
            )

    def written(self) -> None:
        """Notes that somebody wrote the weight, through an alias too.

        Lookups and steps refuse it, as any write of others.
        """
        if self.param_set is not None:
            torch.autograd.graph.increment_version(self.weight)

    def _tell_of_reading(self, rows: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "table %r is read, copied or saved as a whole after a step: its %d "
                "rows come from the servers first, now and whenever that happens "
                "again. opt.flush() before it brings those of all tables at once, and "
                "with Async also waits for the pushes that are queued.",
                self.name,
                rows,
            )

    def check_weight(self, weight: torch.Tensor) -> None:
        """Refuses a weight that took the place of the bound one.

        Raises:
            ModelChangedError: rows would come into one tensor and be read in another,
                whose gradients no optimizer sees.
            UnsupportedModelError: the same, for this one call.
        """
        if weight is not self.weight:
            foreign.check_own_weight(self.name, weight, self.remote)
            raise weight_replaced(self.name)

    def check_not_traced(self) -> None:
        """Refuses ``torch.jit.trace``.

        Raises:
            UnsupportedModelError: it is at work.
        """
        if torch._C._is_tracing():
            raise foreign.graph_without_pull(self.name, self.remote)

    def pull(self, ids: torch.Tensor, weight: torch.Tensor) -> None:
        """Makes the rows of ``ids`` current in the weight.

        Args:
            ids: int32 or int64, any shape, on the CPU or the model's device; under
                ``torch.vmap`` the rows of all its calls come at once.
            weight: what the module looks up.

        Raises:
            RowOutOfRangeError: an id is negative or at least ``rows``.
            ModelChangedError: the weight was written, replaced, converted or moved by
                others.
            PeerLostError, OperationTimeoutError: a server does not answer.
            ClosedError: the optimizer was closed.
            IdTypeError: ``ids`` are of another type.
            UnsupportedModelError: ids on another device; what ``foreign`` refuses.
        """
        given, flat = self._opened_for(ids, weight)
        asked = 0
        if flat.numel():
            small = flat.dtype == torch.int32

            def ask(param_set: _core.ParamSet) -> int:
                self.bind_weight(param_set)
                return param_set.pull(self.table, flat.data_ptr(), flat.numel(), small)

            with ranges.of(ranges.PULL):
                asked = self.lasting(ask)
        if self.told is not None:
            self.told(self.table, given, asked)

    def can_pull(self) -> bool:
        """Whether rows that are pulled now come to where lookups read them."""
        if self.param_set is None or self.moved_to is not None:
            return False
        with as_it_stands():
            return not self._written() and self.weight.data_ptr() == self._address

    def _opened_for(
        self, ids: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Checks a lookup; the ids, and these as the servers take them."""
        self._opened()
        return self._checked(ids, weight)

    def _opened(self) -> _core.ParamSet:
        param_set = self.param_set
        if param_set is None:
            raise ClosedError(
                f"table {self.name!r}: its DistributedOptimizer is closed. Wrap the "
                "optimizer again, or use the model's own modules."
            )
        return param_set

    def _checked(
        self, ids: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Checks a lookup; the ids, and these as the servers take them."""
        self.check_not_traced()
        foreign.check_not_averaged(self.name, self.weight)
        self.check_weight(weight)
        if not isinstance(ids, torch.Tensor):
            raise no_tensor(self.name, ids)
        given = foreign.whole(ids)
        return given, self.checked_ids(given)

    def _written(self) -> bool:
        return self.weight._version > self._versions.get(id(self.weight), -1)

    def _check_unwritten(self) -> None:
        if self._written():
            # A pull would overwrite what was written, a loaded model say.
            raise model_changed([self.name], [self.weight])

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
        if not isinstance(ids, torch.Tensor):
            raise no_tensor(self.name, ids)
        there = not ids.is_cpu and ids.device == self.device
        return ids.to(CPU) if there else ids

    def go_on_with(self, param_set: _core.ParamSet) -> None:
        """Takes another set in the place of one whose servers were lost."""
        self.param_set = param_set

    def close(self) -> None:
        """Ends the binding; a later lookup through it raises ``ClosedError``."""
        self.param_set = None


def bound(handle: int) -> TableBinding | None:
    """The binding of this handle, unless it is gone."""
    return _bindings.get(handle)
