# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loads a snapshot into the servers: plans from its manifest, rows from its files.

Servers read rows themselves; dense parameters are cut anew and sent from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.model.placement import DenseParameter, PlacedTable, Placement
from torch_cpudist.served import described, state_layout
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.snapshot import merging, names
from torch_cpudist.snapshot.choice import Begins, Plan, Taken, Target
from torch_cpudist.snapshot.manifest import Table, Version
from torch_cpudist.snapshot.parts import Array, LoadRun
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.staging import Stage
from torch_cpudist.snapshot.whole import begun_rows, values_of
from torch_cpudist.tables.remote_weight import table_of

# Only drops what is there.
_NO_ROWS = LoadRun("none", 0, 0, 0, (0, 0, 0, 0, 0, 0), ())
_STATE, _COUNT, _AVERAGE = 2, 3, 5  # of a run's offsets
_PART_OF_IT = (
    "Part of it was loaded: load a snapshot again, or start again, before you train on."
)
# Of rows that are on their way to servers at a time.
_STAGED_BYTES = 32 << 20


def targets(placement: Placement) -> list[Target]:
    """What there is to be loaded, in the words of a manifest."""
    layout = placement.layout
    found = []
    for table in placement.tables:
        spec = layout.tables[table.index]
        config = layout.configs[spec.group]
        states = described.table_states(config, spec.dim)
        shape = (spec.rows, spec.dim)
        begins = None
        if spec.remote:
            seed = table_of(table.found.weight).seed_of(spec.name)
            begins = Begins(tuple(spec.initial), tuple(spec.overrides), seed)
        found.append(
            Target(spec.name, True, shape, states, config.kind, begins, open=spec.open)
        )
    for entry in placement.dense:
        config = layout.configs[entry.group]
        parts = described.dense_states(config)
        found.append(
            Target(
                entry.name,
                False,
                tuple(entry.shape),
                parts,
                config.kind,
                dtype=described.DTYPES[entry.dtype],
            )
        )
    return found


def load(
    parameters: ParameterSet,
    snapshot: Snapshot,
    servers: int,
    plan: Plan,
    stage: Stage,
    version: Version | None = None,
) -> None:
    """Loads what a plan takes. By trainer 0, while the others are at a barrier.

    Args:
        parameters: open on the servers.
        snapshot: to load.
        servers: how many there are now.
        plan: what is taken; may name more than these parameters.
        stage: in the directory of the servers.
        version: that they have then; ``None``: the snapshot's.

    Raises:
        SnapshotCorruptError: a file is damaged; what was loaded before it is there.
        SnapshotError: a file cannot be read or written; the same.
    """
    try:
        _load(parameters, snapshot, servers, plan, stage, version)
    except SnapshotCorruptError as error:
        told = SnapshotCorruptError(f"{error} {_PART_OF_IT}", error.file, error.table)
        told.partly_loaded = True
        raise told from error
    except SnapshotError as error:
        failed = SnapshotError(f"{error} {_PART_OF_IT}")
        failed.partly_loaded = True
        raise failed from error


def _load(
    parameters: ParameterSet,
    snapshot: Snapshot,
    servers: int,
    plan: Plan,
    stage: Stage,
    version: Version | None,
) -> None:
    placement = parameters.placement
    version = snapshot.manifest.version if version is None else version
    if plan.whole:
        for server in range(servers):
            # First: averages are as of a version.
            parameters.opened.load_version(
                server, version.round, version.samples, version.steps
            )
    for table in placement.tables:
        if (taken := plan.taken.get(table.found.name)) is not None:
            rows = _Rows(parameters, snapshot, servers, table, taken, stage)
            if taken.crosses:
                rows.load_dense()
            else:
                rows.load()
    for entry in placement.dense:
        if (taken := plan.taken.get(entry.name)) is not None:
            _load_dense(parameters, snapshot, entry, taken)


class _Rows:
    """The rows of one table on their way from a snapshot to servers."""

    def __init__(
        self,
        parameters: ParameterSet,
        snapshot: Snapshot,
        servers: int,
        table: PlacedTable,
        taken: Taken,
        stage: Stage,
    ) -> None:
        self._opened = parameters.opened
        self._snapshot = snapshot
        self._servers = servers
        self._index = table.index
        self._spec = parameters.placement.layout.tables[table.index]
        self._decay = parameters.placement.layout.average_decay
        self._taken = taken
        self._stage = stage
        manifest = snapshot.manifest
        self._step = 0
        if not taken.crosses:
            self._saved: Table = manifest.tables[manifest.table_index(taken.source)]
            self._step = self._saved.step if taken.state else 0

    def load(self) -> None:
        """Has every server read its own."""
        saved_decay = self._snapshot.manifest.average_decay
        beside = self._snapshot.folder.parent.resolve() == (
            self._stage.directory.path.resolve()
        )
        settled = self._decay in (0.0, saved_decay) or not saved_decay
        if beside and settled and self._saved.name == self._spec.name:
            self._load_files()
        else:
            self._load_staged()
        if self._saved.remote and not self._spec.remote:
            self._load_begun()

    def _load_files(self) -> None:
        """From the snapshot's own files."""
        name = self._snapshot.manifest.name
        for server in range(self._servers):
            # Of a static table all rows are there already, and nearly all come anew.
            clear = self._spec.remote
            runs = self._snapshot.load_plan(self._saved.name, server, self._servers)
            for run in runs or ([_NO_ROWS] if clear else []):
                self._send(server, run.snapshot or name, run, clear)
                clear = False

    def _load_staged(self) -> None:
        """From files that are made for it, one after the other."""
        if self._spec.remote:
            for server in range(self._servers):
                self._send(server, self._stage.name, _NO_ROWS, clear=True)
        for columns in self._merged():
            self._send_columns(columns)

    def _send_columns(self, columns: Mapping[str, Array]) -> None:
        salt = names.table_salt(self._spec.name)
        staged = self._stage.put(columns, salt)
        for server in range(self._servers):
            run = staged.load_run(names.server_buckets(server, self._servers))
            if run.row_begin < run.row_end:
                self._send(server, self._stage.name, run)

    def _merged(self) -> Iterator[dict[str, Array]]:
        """All rows, some at a time, with averages by this set's own decay."""
        manifest, saved = self._snapshot.manifest, self._saved
        layers = self._snapshot.layers(saved.name)
        wanted = ["weight", "count", "last_seen"]
        if saved.state_elements and self._taken.state:
            wanted.append("state")
        if manifest.average_decay and self._decay and self._taken.state:
            wanted.append("average")
        row_bytes = 16 + 4 * (2 * saved.dim + saved.state_elements)
        for run in merging.merged(
            layers,
            saved.salt,
            wanted,
            max(_STAGED_BYTES // row_bytes, 1),
            saved.name,
        ):
            if not len(run.keys):
                continue
            columns = {"keys": run.keys, **run.columns}
            if "average" in columns and self._decay != manifest.average_decay:
                settle_averages(columns, manifest.version.round, manifest.average_decay)
            yield columns

    def _load_begun(self) -> None:
        """Rows of a remote table that nobody had trained, which its files have not."""
        there = np.zeros(self._saved.rows, dtype=np.bool_)
        layers = self._snapshot.layers(self._saved.name)
        for run in merging.merged(layers, self._saved.salt, ()):
            there[run.keys] = True
        absent = np.flatnonzero(~there)
        at_once = max(_STAGED_BYTES // (8 + 4 * self._saved.dim), 1)
        for begin in range(0, len(absent), at_once):
            keys = absent[begin : begin + at_once].astype(np.int64)
            weight = begun_rows(self._saved, keys)
            self._send_columns({"keys": keys, "weight": weight})

    def load_dense(self) -> None:
        """Has every server read its own rows of what was a dense parameter."""
        if self._spec.remote:
            for server in range(self._servers):
                self._send(server, self._stage.name, _NO_ROWS, clear=True)
        weight = self._snapshot.dense(self._taken.source)
        at_once = max(_STAGED_BYTES // (8 + 4 * self._spec.dim), 1)
        for begin in range(0, len(weight), at_once):
            some = weight[begin : begin + at_once]
            keys = np.arange(begin, begin + len(some), dtype=np.int64)
            self._send_columns({"keys": keys, "weight": some})

    def _send(
        self, server: int, folder: str, run: LoadRun, clear: bool = False
    ) -> None:
        offsets = list(run.offsets)
        if not self._taken.state:
            # An average without its count would be taken for one that begins.
            offsets[_STATE] = offsets[_COUNT] = offsets[_AVERAGE] = 0
        if not self._decay:
            offsets[_AVERAGE] = 0
        self._opened.load_rows(
            server,
            self._index,
            clear=clear,
            seed=self._taken.seed,
            round=self._snapshot.manifest.version.round,
            table_step=self._step,
            snapshot=folder,
            file=run.file,
            file_bytes=run.file_bytes,
            row_begin=run.row_begin,
            row_end=run.row_end,
            offsets=offsets,
            crcs=list(run.crc32c),
        )


def settle_averages(columns: dict[str, Array], updates: int, decay: float) -> None:
    """Brings averages up to date, so that another decay goes on from there.

    A row of a server that was ahead of the manifest's round stays as of its own update.

    Args:
        columns: of some rows: ``weight`` and ``average`` [n, dim], ``count`` and
            ``last_seen`` [n]; the last and the average are replaced.
        updates: the manifest's ``version.round``.
        decay: of the averages.
    """
    last_seen = columns["last_seen"]
    missed = np.uint32(updates % 2**32) - last_seen - np.uint32(1)
    missed = missed.view(np.int32)  # counted modulo 2^32
    weight = columns["weight"].astype(np.float64)
    kept = np.power(decay, np.maximum(missed, 0).astype(np.float64))[:, None]
    average = weight + kept * (columns["average"] - weight)
    trained = (columns["count"] > 0)[:, None]
    columns["average"] = np.where(trained, average, weight).astype(np.float32)
    settled = np.full_like(last_seen, (updates - 1) % 2**32)
    columns["last_seen"] = np.where(missed < 0, last_seen, settled)


def _load_dense(
    parameters: ParameterSet, snapshot: Snapshot, entry: DenseParameter, taken: Taken
) -> None:
    """Sends a dense parameter and its state, cut as servers have it now."""
    manifest, layout = snapshot.manifest, parameters.placement.layout
    weight = _tensor(values_of(snapshot, taken.source))
    state: dict[str, object] = {}
    if taken.state:
        saved = manifest.dense[manifest.dense_index(taken.source)]
        step = max((block.step for block in saved.blocks), default=0)
        states = snapshot.dense_state(taken.source) if step else {}
        state = {name: _tensor(value) for name, value in states.items()}
        if step:
            state["step"] = step
    average = None
    if taken.state and layout.average_decay and manifest.average_decay:
        average = _tensor(snapshot.dense_average(taken.source))
    config = layout.configs[entry.group]
    state_layout.store_dense_state(
        parameters, entry, config, state, weight, average=average
    )


def _tensor(values: np.ndarray) -> torch.Tensor:
    """A tensor of its own of what may be a view of a file."""
    return torch.from_numpy(np.array(values))


def take_in(parameters: ParameterSet, plan: Plan) -> None:
    """Takes loaded values over, on every trainer, after a barrier."""
    for table in parameters.placement.tables:
        taken = plan.taken.get(table.found.name)
        if taken is not None and table.found.remote:
            table_of(table.found.weight).begin_from(taken.seed)
    parameters.begin_anew()
