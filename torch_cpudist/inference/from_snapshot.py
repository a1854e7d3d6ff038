# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The values of a model out of a snapshot, for an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError, SnapshotError
from torch_cpudist.exports.manifest import Table
from torch_cpudist.exports.writing import PART_BYTES
from torch_cpudist.inference.places import plain_tensors, remote_places
from torch_cpudist.log import logger
from torch_cpudist.snapshot.entries import Table as SavedTable
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.merging import Run, merged
from torch_cpudist.snapshot.parts import Array
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.tables.remote_weight import table_of


def _keys_of(opened: bool) -> str:
    return "any key" if opened else "keys that are rows"


class SnapshotValues:
    """Values, or their averages, that a snapshot has.

    Args:
        snapshot: it.
        averaged: averages in the place of values.

    Raises:
        InvalidArgumentError: it has no averages.
    """

    def __init__(self, snapshot: Snapshot, averaged: bool) -> None:
        self._snapshot = snapshot
        self._averaged = averaged
        self.manifest: Manifest = snapshot.manifest
        if averaged and not self.manifest.average_decay:
            raise InvalidArgumentError(
                f"export: averaged=True, and snapshot {self.manifest.name} was saved "
                "without average=cpudist.EMA"
            )
        self._tables = {table.name: table for table in self.manifest.tables}
        self._dense = {dense.name for dense in self.manifest.dense}

    def remote_tables(self, model: nn.Module) -> list[Table]:
        """The tables that are remote in the model.

        Raises:
            SnapshotError: it has not all of them, or of another shape.
        """
        found = []
        for place in remote_places(model):
            known = [name for name in place.names if name in self._tables]
            if not known:
                raise SnapshotError(
                    f"export: snapshot {self.manifest.name} has no table "
                    f"{place.name!r}, only {sorted(self._tables)}"
                )
            saved = self._tables[known[0]]
            opened = table_of(place.weight).open is not None
            self._check_shape(saved, tuple(place.weight.shape), opened)
            # Keys without a row read zeros without an initialiser.
            zeros = saved.open is not None and saved.open.unknown == "zeros"
            found.append(
                Table(
                    saved.name,
                    saved.rows,
                    saved.dim,
                    saved.seed,
                    () if zeros else saved.initial,
                    () if zeros else saved.overrides,
                    saved.open is not None,
                )
            )
        return found

    def _check_shape(
        self, saved: SavedTable, shape: tuple[int, ...], opened: bool = False
    ) -> None:
        if (saved.open is not None) != opened:
            raise SnapshotError(
                f"export: table {saved.name!r} is of {_keys_of(not opened)} in "
                f"snapshot {self.manifest.name}, of {_keys_of(opened)} in the model"
            )
        if (saved.rows, saved.dim) != shape:
            raise SnapshotError(
                f"export: table {saved.name!r} is {[saved.rows, saved.dim]} in "
                f"snapshot {self.manifest.name}, {list(shape)} in the model"
            )

    def runs(self, table: str) -> Iterator[Run]:
        """All rows that a table has, by bucket and key, as ``weight``.

        Raises:
            SnapshotCorruptError: a file is not as it was written.
        """
        saved = self._tables[table]
        wanted = ["weight"]
        if self._averaged:
            wanted += ["average", "count", "last_seen"]
        row_bytes = 8 + 4 * saved.dim * (2 if self._averaged else 1)
        layers = self._snapshot.layers(table)
        at_once = max(PART_BYTES // row_bytes, 1)
        for run in merged(layers, saved.salt, wanted, at_once, table):
            if not self._averaged or not run.columns:
                yield run
                continue
            yield dataclasses.replace(run, columns={"weight": self._settled(run)})

    def _settled(self, run: Run) -> Array:
        """Averages at the moment of the snapshot."""
        columns = run.columns
        weight, average = columns["weight"], columns["average"]
        now = np.uint32(self.manifest.version.round & 0xFFFFFFFF)
        # Counted modulo 2^32. A server may have been ahead of the cut's round.
        missed = (now - columns["last_seen"] - np.uint32(1)).view(np.int32)
        updates = np.maximum(missed, 0).astype(np.float64)
        left = np.power(self.manifest.average_decay, updates)[:, None]
        moved = weight + left * (average.astype(np.float64) - weight)
        found: npt.NDArray[np.float32] = np.where(
            columns["count"][:, None] > 0, moved, weight
        ).astype(np.float32)
        return found

    def tensors(
        self, model: nn.Module, named: bool
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Everything but remote tables, by the names of ``state_dict()``.

        What no optimizer trains (frozen parameters, and buffers unless a snapshot was
        named) is the model's own.

        Args:
            model: whose names.
            named: the snapshot was named, and may be of another moment than the model:
                buffers are those of its trainer 0.

        Returns:
            The values, and the names of those which are rows of tables.

        Raises:
            SnapshotError: it has parameters that the model has not, or of other shapes.
            SnapshotCorruptError: a file is not as it was written.
        """
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        known = {n: names for names in aliases.values() for n in names}
        buffers = self._saved_buffers() if named else {}
        remote = {n for place in remote_places(model) for n in place.names}
        found, tables, own = {}, [], []
        used: set[str] = set(remote)
        for name, value in plain_tensors(model).items():
            names = known.get(name, [])
            saved = next((n for n in names if n in self._tables), None)
            dense = next((n for n in names if n in self._dense), None)
            if saved is not None:
                found[name] = self._whole_table(saved, tuple(value.shape))
                tables.append(name)
            elif dense is not None:
                found[name] = self._dense_value(dense, tuple(value.shape))
            else:
                found[name] = buffers.get(name, value)
                own += [name] if names else []
            used.update(names)
        absent = sorted({*self._tables, *self._dense} - used)
        if absent:
            raise SnapshotError(
                f"export: snapshot {self.manifest.name} is of another model: it has "
                f"{absent}, which this model has not"
            )
        if own:
            log = logger.warning if named else logger.info
            log(
                "export: snapshot %s has no %s, which are taken as the model has them",
                self.manifest.name,
                ", ".join(own),
            )
        return found, tables

    def _saved_buffers(self) -> dict[str, torch.Tensor]:
        """Those that trainer 0 had."""
        rank = min((one.rank for one in self.manifest.trainers), default=0)
        tree = self._snapshot.trainer(rank)
        found: dict[str, torch.Tensor] = tree["own"]["buffers"] if tree else {}
        return found

    def _dense_value(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        snapshot = self._snapshot
        average = self._averaged
        values = snapshot.dense_average(name) if average else snapshot.dense(name)
        if values.shape != shape:
            raise SnapshotError(
                f"export: {name!r} is {list(values.shape)} in snapshot "
                f"{self.manifest.name}, {list(shape)} in the model"
            )
        return torch.from_numpy(np.array(values))

    def _whole_table(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A table with rows in the model, as an array."""
        saved = self._tables[name]
        self._check_shape(saved, shape)
        values = np.empty((saved.rows, saved.dim), np.float32)
        rows = 0
        for run in self.runs(name):
            values[run.keys] = run.columns["weight"] if run.columns else 0
            rows += len(run.keys)
        if rows != saved.rows:
            raise SnapshotError(
                f"export: table {name!r} has rows in memory in this model, and "
                f"snapshot {self.manifest.name} has {rows} of its {saved.rows}: it was "
                "remote there. Build the model with it in cpudist.remote_tables."
            )
        return torch.from_numpy(values)
