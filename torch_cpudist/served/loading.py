# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads a snapshot into the servers: plans from its manifest, rows from its files.

Servers read rows themselves; dense parameters are cut anew and sent from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torch_cpudist.errors import SnapshotError
from torch_cpudist.model.placement import DenseParameter, PlacedTable
from torch_cpudist.served import described, state_layout
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.snapshot.manifest import Manifest
from torch_cpudist.snapshot.parts import LoadRun
from torch_cpudist.snapshot.reading import Snapshot

_NO_OFFSET = 0
# Only drops what is there.
_NO_ROWS = LoadRun("none", 0, 0, 0, (0, 0, 0, 0, 0, 0), ())
_STATE, _COUNT = 2, 3  # of a run's offsets


def load(parameters: ParameterSet, snapshot: Snapshot, servers: int) -> list[str]:
    """Loads what fits. By trainer 0, while the others are at a barrier.

    Args:
        parameters: open on the servers.
        snapshot: to load.
        servers: how many there are now.

    Returns:
        What was and what was not taken, as sentences.

    Raises:
        SnapshotCorruptError: a file is damaged; what was loaded before it is there.
        SnapshotError: nothing of it fits; nothing was changed.
    """
    placement, manifest = parameters.placement, snapshot.manifest
    tables = {table.name: table for table in manifest.tables}
    dense = {entry.name: entry for entry in manifest.dense}
    own = [t.found.name for t in placement.tables] + [d.name for d in placement.dense]
    if own and not any(name in tables or name in dense for name in own):
        raise SnapshotError(
            f"snapshot {manifest.name} has nothing of this model: it has tables "
            f"{sorted(tables)} and dense parameters {sorted(dense)}, the model has "
            f"{sorted(own)}. Nothing was changed."
        )
    version = manifest.version
    for server in range(servers):
        # First: averages are as of a version.
        parameters.opened.load_version(
            server, version.round, version.samples, version.steps
        )
    report = []
    for table in placement.tables:
        report.append(_load_table(parameters, snapshot, table, servers))
    report += [_load_dense(parameters, snapshot, entry) for entry in placement.dense]
    report += _left_out(manifest, own)
    return [line for line in report if line]


def _left_out(manifest: Manifest, own: Sequence[str]) -> list[str]:
    names = [table.name for table in manifest.tables]
    names += [entry.name for entry in manifest.dense]
    return [f"{n!r} of the snapshot is not in the model" for n in names if n not in own]


def _load_table(
    parameters: ParameterSet, snapshot: Snapshot, table: PlacedTable, servers: int
) -> str:
    """Has every server read its rows of a table."""
    placement, manifest = parameters.placement, snapshot.manifest
    spec = placement.layout.tables[table.index]
    saved = {one.name: one for one in manifest.tables}.get(spec.name)
    if saved is None:
        return f"table {spec.name!r} is not in the snapshot and begins anew"
    if saved.dim != spec.dim or saved.rows > spec.rows:
        return (
            f"table {spec.name!r} was {saved.rows} rows of {saved.dim}, is {spec.rows} "
            f"of {spec.dim}: it begins anew"
        )
    states = described.table_states(placement.layout.configs[spec.group], spec.dim)
    fits = states == saved.state
    loaded = 0
    for server in range(servers):
        # Of a static table all rows are there already, and nearly all come anew.
        clear = spec.remote
        runs = snapshot.load_plan(spec.name, server, servers)
        for run in runs or ([_NO_ROWS] if clear else []):
            offsets = list(run.offsets)
            if not fits:
                offsets[_STATE] = offsets[_COUNT] = _NO_OFFSET
            parameters.opened.load_rows(
                server,
                table.index,
                clear=clear,
                table_step=saved.step if fits else 0,
                snapshot=manifest.name,
                file=run.file,
                file_bytes=run.file_bytes,
                row_begin=run.row_begin,
                row_end=run.row_end,
                offsets=offsets,
                crcs=list(run.crc32c),
            )
            clear = False
            loaded += run.row_end - run.row_begin
    if fits:
        return f"table {spec.name!r}: {loaded} rows"
    return (
        f"table {spec.name!r}: {loaded} rows, without their optimizer state, which is "
        f"of {saved.rule.kind} and begins anew"
    )


def _load_dense(
    parameters: ParameterSet, snapshot: Snapshot, entry: DenseParameter
) -> str:
    """Sends a dense parameter and its state, cut as servers have it now."""
    manifest = snapshot.manifest
    saved = {one.name: one for one in manifest.dense}.get(entry.name)
    if saved is None:
        return f"parameter {entry.name!r} is not in the snapshot and begins anew"
    if saved.shape != tuple(entry.shape):
        return (
            f"parameter {entry.name!r} was {list(saved.shape)}, is "
            f"{list(entry.shape)}: it begins anew"
        )
    config = parameters.placement.layout.configs[entry.group]
    fits = described.dense_states(config) == saved.state
    fits = fits and saved.rule.kind == config.kind
    weight = _tensor(snapshot.dense(entry.name))
    state: dict[str, object] = {}
    step = max((block.step for block in saved.blocks), default=0)
    if fits and step:
        state = {n: _tensor(v) for n, v in snapshot.dense_state(entry.name).items()}
        state["step"] = step
    average = None
    if parameters.placement.layout.average_decay and manifest.average_decay:
        average = _tensor(snapshot.dense_average(entry.name))
    state_layout.store_dense_state(
        parameters, entry, config, state, weight, average=average
    )
    if fits:
        return ""
    return (
        f"parameter {entry.name!r} without its optimizer state, which is of "
        f"{saved.rule.kind} and begins anew"
    )


def _tensor(values: np.ndarray) -> torch.Tensor:
    """A tensor of its own of what may be a view of a file."""
    return torch.from_numpy(np.array(values))


def take_in(parameters: ParameterSet) -> None:
    """Takes loaded values over, on every trainer, after a barrier."""
    for binding in parameters.bindings:
        binding.forget_rows(parameters.opened)
    parameters.opened.drop_prefetched()
    parameters.tables_current = False
    parameters.join()
    parameters.accept_changes()
