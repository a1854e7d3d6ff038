# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class
"""A model that was loaded from an export, and what comes to it since."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torch_cpudist import _core
from torch_cpudist.errors import (
    ClosedError,
    InvalidArgumentError,
    ModelChangedError,
    OperationTimeoutError,
    SnapshotError,
)
from torch_cpudist.exports.layers import TableLayers, layers_of, whole
from torch_cpudist.exports.manifest import Manifest
from torch_cpudist.exports.reading import Export
from torch_cpudist.inference.forward_guard import ForwardGuard
from torch_cpudist.inference.places import Places, untied
from torch_cpudist.inference.shared_lock import SharedLock
from torch_cpudist.inference.slots import Change, write
from torch_cpudist.snapshot.entries import Version
from torch_cpudist.tables.binding import check_kind
from torch_cpudist.tables.exported_binding import ExportedBinding
from torch_cpudist.tables.local import attach, detach
from torch_cpudist.tables.remote_weight import table_of

# Rows that are brought to a weight at once.
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Loaded:
    """Which values a model has.

    Attributes:
        name: of the newest export's directory.
        id: of that export.
        version: of the parameters: updates, and the samples and steps behind them.
        dtype: of rows.
        averaged: whether values are moving averages.
        deltas: how many were applied to the whole export.
    """

    name: str
    id: str
    version: Version
    dtype: str
    averaged: bool
    deltas: int


def loaded_of(exports: Sequence[Export]) -> Loaded:
    """What a chain of exports gives, the whole one first."""
    return _loaded(exports[-1], len(exports) - 1)


def _loaded(export: Export, deltas: int) -> Loaded:
    told = export.manifest
    return Loaded(
        export.folder.name, told.id, told.version, told.dtype, told.averaged, deltas
    )


class Reader:
    """What ``load_for_inference`` returns: a model's values, and newer ones for it.

    Thread safety: forwards of the model, ``reading`` and ``look_up`` from any number of
    threads; ``apply_delta`` and ``close`` from any, they take turns.
    """

    def __init__(self, model: nn.Module, exports: Sequence[Export], places: Places):
        """Fills ``model``; see ``load_for_inference``."""
        self._lock = SharedLock()
        self._turn = threading.Lock()
        self._places = places
        self._manifest: Manifest = exports[-1].manifest
        self._loaded = loaded_of(exports)
        newest = exports[-1]
        self._known_tensors = newest.shapes(), newest.dtypes()
        names = [one.name for one in newest.manifest.tables]
        self._layers = {name: layers_of(exports, name) for name in names}
        self._tables = {name: one.native() for name, one in self._layers.items()}
        self._whole = {place.name: whole(newest, place.name) for place in places.whole}
        self._fill(newest)
        self._tensors = {name: slot.now() for name, slot in places.filled.items()}
        self._bindings: dict[str, ExportedBinding] = {}
        self._names: dict[str, str] = {}
        for place in (*places.mapped, *places.whole):
            self._names.update(dict.fromkeys(place.names, place.name))
            rows = (self._tables | self._whole)[place.name]
            table_of(place.weight).values = None
            binding = ExportedBinding(rows, place.name, place.weight)
            self._bindings[place.name] = binding
            for module in place.modules:
                attach(module, binding)
        self._guard: ForwardGuard | None = ForwardGuard(model, self._lock)

    def _fill(self, export: Export) -> None:
        """Brings everything to the model that has memory there."""
        places = self._places
        # Before anything is changed.
        export.check_tensors(places.copied.keys())
        for slot in (*places.copied.values(), *places.filled.values()):
            slot.check_writable()
        for name in places.filled:
            self._tables[name].check_all()
        for name, slot in places.filled.items():
            _fill_table(self._tables[name], slot.now())
        for name, values in export.tensors(places.copied.keys()):
            slot = places.copied[name]
            write(slot.now(), slot.fitting(values))

    @property
    def loaded(self) -> Loaded:
        """Which values the model has now."""
        return self._loaded

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """Rows and dim of every table that ``look_up`` knows, by name."""
        found = {n: (one.table.rows, one.table.dim) for n, one in self._layers.items()}
        for place in self._places.whole:
            table = table_of(place.weight)
            found[place.name] = (table.rows, table.dim)
        return found

    @contextlib.contextmanager
    def reading(self) -> Iterator[Loaded]:
        """While it is entered, the model's values stay what they are.

        For what has to be of one state and is no single forward of the model: a part of
        it that is called alone, several forwards, ``look_up``. Forwards of the model
        are inside of one already. ``apply_delta`` waits; not to be called inside. Other
        threads may go on with the model meanwhile, and this one may wait for them.

        Yields:
            Which values these are.
        """
        share = self._lock.enter()
        try:
            self._check_open()
            yield self._loaded
        finally:
            self._lock.leave(share)

    def look_up(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table, without its module.

        Args:
            table: one of ``tables``, or another name that the model has for it.
            ids: int32 or int64, any shape, on the CPU.

        Returns:
            float32 ``[*ids.shape, dim]``. Keys that are in no file have the rows that
            the table's initialiser makes of them.

        Raises:
            InvalidArgumentError: there is no such table.
            IdTypeError, RowOutOfRangeError: ids are none of the table.
            SnapshotCorruptError: a part of a file that is needed is damaged.
        """
        with self.reading():
            known = self.tables
            table = self._names.get(table, table)
            if table not in known:
                raise InvalidArgumentError(
                    f"look_up: no table {table!r}, only {sorted(known)}"
                )
            check_kind(table, ids)
            rows = self._tables.get(table) or self._whole[table]
            return _looked_up(rows, ids.contiguous(), known[table][1])

    def verify(self) -> None:
        """Reads and checks every byte of all files of rows.

        Else lookups do so, each of what it needs and nobody has checked yet.

        Raises:
            SnapshotCorruptError: one is not as it was written.
        """
        self._check_open()
        for rows in (*self._tables.values(), *self._whole.values()):
            rows.check_all()

    def apply_delta(
        self, path: str | os.PathLike[str], *, timeout_s: float = 60.0
    ) -> Loaded:
        """Takes over a delta export, while others may use the model.

        All of it is read and checked first. Then forwards that are under way end, the
        values change, and those that came meanwhile go on: none sees a part of it.

        Forwards that come meanwhile are held back for a tenth of a second. If others
        are still under way then, they go on, until those have ended, and it tries
        again: threads may wait for each other inside of ``reading``.

        A lookup goes through at most 8 deltas. Where there are as many, they become one
        in memory: the rows that have changed since the whole export was made. Load a
        whole one again before that is much of the table.

        Args:
            path: what ``export(…, base=)`` has written, of the export that is loaded.
            timeout_s: how long to wait for forwards, and for another delta.

        Returns:
            Which values the model has now.

        Raises:
            SnapshotError: it is no delta of what is loaded; nothing was changed.
            SnapshotCorruptError: a file of it is damaged; nothing was changed.
            ModelChangedError: a parameter or buffer is not there any more, or of
                another dtype or shape than when it was loaded; nothing was changed.
            OperationTimeoutError: forwards did not end in time; nothing was changed.
            InvalidArgumentError: it is called inside of ``reading`` or of a forward.

        Cost: reads the delta, and has memory for all that it writes into the model;
        forwards wait while that is copied.
        """
        self._check_open()
        _check_timeout("apply_delta", timeout_s)
        if self._lock.depth:
            raise InvalidArgumentError(
                "apply_delta: called inside of reading(), or of a forward of the "
                "model, whose values stay what they are. Call it outside."
            )
        if not self._turn.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise OperationTimeoutError(
                f"apply_delta: another delta was being applied for all of {timeout_s} "
                "s. Nothing was changed. Call it again."
            )
        try:
            self._check_open()
            return self._apply(Export(path), timeout_s)
        finally:
            self._turn.release()

    def _apply(self, delta: Export, timeout_s: float) -> Loaded:
        self._check_fits(delta)
        delta.check()
        for names in self._places.tied:
            if problem := untied(delta, names):
                raise SnapshotError(
                    f"export {delta.folder.name} is of another model: {problem}. "
                    "Nothing was changed."
                )
        layers: dict[str, TableLayers] = {}
        for index, table in enumerate(delta.manifest.tables):
            before = self._layers[table.name]
            layers[table.name] = before.with_delta(delta.rows_files(index))
        tables = {name: one.native() for name, one in layers.items()}
        wholes = {name: whole(delta, name) for name in self._whole}
        bound = {name: (tables | wholes)[name] for name in self._bindings}
        changes = self._changes(delta, tables)
        loaded = _loaded(delta, self._loaded.deltas + 1)
        with self._lock.alone(timeout_s):
            # Modules may have got other tensors since; nothing is changed if one
            # does not fit, and from then on nothing can fail.
            there = [change.target() for change in changes]
            for change, tensor in zip(changes, there, strict=True):
                write(tensor, change.values, change.rows)
            for name, binding in self._bindings.items():
                binding.rows = bound[name]
            self._layers, self._tables, self._whole = layers, tables, wholes
            self._manifest, self._loaded = delta.manifest, loaded
        return loaded

    def _changes(
        self, delta: Export, tables: Mapping[str, _core.ExportedTable]
    ) -> list[Change]:
        """What a delta writes into the model, as it will be written."""
        places, found = self._places, []
        for name, value in delta.tensors(places.copied.keys()):
            slot = places.copied[name]
            slot.check_writable()
            found.append(Change(slot, slot.fitting(value), None))
        for name, slot in places.filled.items():
            slot.check_writable()
            keys, rows = _changed(delta, name, tables[name])
            there = slot.now()
            if there is not self._tensors[name]:
                raise ModelChangedError(
                    f"{name!r} is another parameter than the one that got the rows of "
                    f"{self._loaded.name}, and a delta has only those that changed "
                    "since. Nothing was changed. Load the export again."
                )
            found.append(Change(slot, slot.fitting(rows), keys.to(there.device)))
        return found

    def _check_fits(self, delta: Export) -> None:
        told, known = delta.manifest, self._manifest
        base = told.base
        if base is None:
            raise SnapshotError(
                f"export {delta.folder.name} is a whole one, no delta: load it into "
                "a model of its own with load_for_inference."
            )
        if base.id != known.id:
            raise SnapshotError(
                f"export {delta.folder.name} has what changed since {base.name} (id "
                f"{base.id}), and {self._loaded.name} (id {known.id}) is loaded. Apply "
                "the deltas in the order in which they were made."
            )
        same = (told.dtype, told.averaged, told.tables)
        of_known = (known.dtype, known.averaged, known.tables)
        tensors = (delta.shapes(), delta.dtypes())
        if same != of_known or tensors != self._known_tensors:
            raise SnapshotError(
                f"export {delta.folder.name} is of another model, or has rows of "
                f"another dtype, than {self._loaded.name}, which is loaded"
            )

    def _check_open(self) -> None:
        if self._guard is None:
            raise ClosedError("this reader of an export is closed; load it again")

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Lets go of the files. Idempotent.

        Dense values stay in the model. Its remote tables have no rows any more.

        Args:
            timeout_s: how long to wait for forwards, for ``reading``, and for a delta
                that is being applied.

        Raises:
            OperationTimeoutError: they did not end in time; the reader stays open.
            InvalidArgumentError: it is called inside of ``reading`` or of a forward.
        """
        _check_timeout("close", timeout_s)
        if self._lock.depth:
            raise InvalidArgumentError(
                "close: called inside of reading(), or of a forward of the model"
            )
        until = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise OperationTimeoutError(
                f"close: a delta was being applied for all of {timeout_s} s, expected "
                "its end. The reader stays open. Call it again."
            )
        try:
            left_s = max(until - time.monotonic(), 0.0)
            self._let_go(left_s)
        except OperationTimeoutError as error:
            raise OperationTimeoutError(
                f"close: forwards of the model, or reading(), were under way for all "
                f"of {timeout_s} s. The reader stays open. Call it again, or leave "
                "reading() sooner."
            ) from error
        finally:
            self._turn.release()

    def _let_go(self, timeout_s: float) -> None:
        with self._lock.alone(timeout_s):
            guard, self._guard = self._guard, None
            if guard is None:
                return
            guard.remove()
            for place in (*self._places.mapped, *self._places.whole):
                self._bindings[place.name].close()
                for module in place.modules:
                    detach(module)
            self._bindings, self._tables, self._whole = {}, {}, {}
            self._layers = {}

    def __enter__(self) -> Reader:
        """For ``with``."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Closes it, as ``close()`` does. What has ended the block goes on."""
        try:
            self.close()
        except (InvalidArgumentError, OperationTimeoutError):
            if error is None:
                raise


def _check_timeout(what: str, timeout_s: float) -> None:
    if not timeout_s > 0:
        raise InvalidArgumentError(
            f"{what}: timeout_s={timeout_s}, expected seconds above 0"
        )


def _looked_up(rows: _core.ExportedTable, ids: torch.Tensor, dim: int) -> torch.Tensor:
    out = torch.empty((*ids.shape, dim), dtype=torch.float32, device="cpu")
    if ids.numel():
        small = ids.dtype == torch.int32
        rows.lookup(ids.data_ptr(), ids.numel(), small, out.data_ptr())
    return out


def _fill_table(rows: _core.ExportedTable, weight: torch.Tensor) -> None:
    """Brings all rows of a table to a weight in memory."""
    quietly = torch.inference_mode() if weight.is_inference() else torch.no_grad()
    with quietly:
        for begin in range(0, len(weight), _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, len(weight))
            ids = torch.arange(begin, end, device="cpu")
            weight[begin:end].copy_(_looked_up(rows, ids, weight.shape[1]))


def _changed(
    delta: Export, name: str, rows: _core.ExportedTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that a delta says something of, and their rows from then on."""
    layer = delta.layer(name)
    keys = [torch.from_numpy(layer.gone.copy())]
    keys += [torch.from_numpy(one.column("keys").copy()) for one in layer.sources]
    joined: torch.Tensor = torch.unique(torch.cat(keys))
    dim = next(one.dim for one in delta.manifest.tables if one.name == name)
    return joined, _looked_up(rows, joined, dim)
