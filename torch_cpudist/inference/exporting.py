# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``export``: a model's values as files that need no cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_cpudist.errors import InvalidArgumentError, RemoteTableError, SnapshotError
from torch_cpudist.exports.encoding import check_dtype
from torch_cpudist.exports.manifest import Manifest
from torch_cpudist.exports.names import folder_of
from torch_cpudist.exports.reading import Export, chain
from torch_cpudist.exports.writing import Writer, check_free, check_goes_on, new_id
from torch_cpudist.inference.from_snapshot import SnapshotValues
from torch_cpudist.inference.places import plain_tensors, remote_places
from torch_cpudist.launch.context import last
from torch_cpudist.log import logger
from torch_cpudist.optimizer.distributed import DistributedOptimizer
from torch_cpudist.resuming.snapshots import Snapshots
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.entries import Version
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.tables.local import binding_of

StrPath = str | os.PathLike[str]


def export(
    model: nn.Module,
    path: StrPath,
    dtype: str = "fp32",
    *,
    snapshot: StrPath | None = None,
    base: StrPath | None = None,
    averaged: bool = False,
) -> None:
    """Writes a model's values to files that ``load_for_inference`` reads anywhere.

    Of a model with remote tables that a ``DistributedOptimizer`` trains, values are
    those of a snapshot that is saved now; ``opt.resume`` has said where. Like
    ``save_snapshot`` it is then collective under ``Sync``, ``Hybrid`` and
    ``Geo(outer=)``, trainer 0's alone under ``Async`` and ``Geo``, and under
    ``HalfAsync`` called by all of trainer 0's group. Of other models they are the
    model's own, after a ``flush()``; each trainer may call it or not, and trainer 0
    writes. Without an optimizer this process does.

    Args:
        model: the one that is trained, or one that has values.
        path: a directory that is not there yet, or is empty. The export exists when its
            ``manifest.json`` does, which is written last.
        dtype: of rows of tables: ``"fp32"``, or fewer bits: ``"fp16"``, ``"bf16"``,
            ``"int8"`` with a scale per row. Other parameters keep theirs.
        snapshot: the values are those of this one: a name in the optimizer's directory
            of snapshots, or the path of a snapshot, for which no ``init()`` is needed.
        base: an export in the same directory: only rows that differ from it are
            written. For ``Reader.apply_delta``.
        averaged: the moving averages that ``average=`` keeps, in the place of values.

    Raises:
        InvalidArgumentError: an argument is wrong.
        SnapshotError: there is no snapshot to take rows from, or it is of another
            model, or ``path`` has files already, or cannot be written.
        SnapshotCorruptError: a file of the snapshot, or of the base, is damaged.
        RemoteTableError: nobody has the rows of a remote table.

    Cost: saves a snapshot; reads it and, with ``base``, the base. Memory: of remote
    tables some tens of MB, and the keys that went since the base; of the model's
    own values one parameter at a time; of a snapshot's, those of dense parameters and
    static tables.
    """
    check_dtype(dtype)
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"export: expected a torch.nn.Module, found {type(model).__name__}"
        )
    for one in (path, *([] if base is None else [base])):
        folder_of(one)
    opt = _optimizer_of(model)
    if snapshot is not None:
        folder = _folder_of(snapshot, opt)
        bases = _checked(model, path, dtype, base, averaged)
        _write_snapshot(model, path, dtype, folder, bases, averaged, named=True)
    elif opt is None:
        bases = _checked(model, path, dtype, base, averaged)
        _write_own(model, path, dtype, bases, averaged, Version())
    elif any(table.found.remote for table in opt.trained.placement.tables):
        _export_saved(model, path, dtype, opt, base, averaged)
    else:
        _export_own(model, path, dtype, opt, base, averaged)


def _checked(
    model: nn.Module, path: StrPath, dtype: str, base: StrPath | None, averaged: bool
) -> tuple[Export, ...]:
    """Checks what can be known before there are values; returns the base's chain.

    Raises:
        SnapshotError: the directory is not free, there is no base, or the model has
            something that no file can have.
        SnapshotCorruptError: the base is damaged.
        InvalidArgumentError: the base is of something else.
        UnsupportedModelError: a module cannot look up rows that are elsewhere.
    """
    folder = folder_of(path)
    check_free(folder)
    plain_tensors(model)
    places = remote_places(model)
    bases = () if base is None else chain(base)
    if bases:
        known = bases[-1].manifest
        wanted = Manifest(known.id, dtype, averaged, tables=known.tables)
        check_goes_on(folder, wanted, bases)
        named = {name for place in places for name in place.names}
        others = sorted({table.name for table in known.tables} - named)
        if others or len(known.tables) != len(places):
            raise InvalidArgumentError(
                f"export: base {bases[-1].folder.name} has the remote tables "
                f"{sorted(table.name for table in known.tables)}, this model "
                f"{[place.name for place in places]}. Export the model as a whole."
            )
    return bases


def _optimizer_of(model: nn.Module) -> DistributedOptimizer | None:
    """The one that trains the model; ``None`` if nobody does here.

    Raises:
        InvalidArgumentError: several do.
    """
    run = last()
    if run is None or run.closed:
        return None
    mine = {id(parameter) for parameter in model.parameters()}
    found = [
        one
        for one in (part.optimizer for part in run.participants())
        if isinstance(one, DistributedOptimizer)
        and mine & {id(parameter) for parameter in one.trained_parameters()}
    ]
    if len(found) > 1:
        raise InvalidArgumentError(
            f"export: {len(found)} DistributedOptimizers train parts of this model. "
            "Export the parts, each of which one optimizer trains."
        )
    return found[0] if found else None


def _folder_of(snapshot: StrPath, opt: DistributedOptimizer | None) -> Path:
    text = os.fspath(snapshot)
    if isinstance(snapshot, str) and os.sep not in text:
        names.check_name(text)
        if opt is None or opt.snapshots is None:
            raise SnapshotError(
                f"export: snapshot {text!r} is a name, and no optimizer of this model "
                "has said where snapshots are. Pass the snapshot's path, or call "
                "opt.resume(directory) first."
            )
        return opt.snapshots.directory.folder(text)
    return Path(text).expanduser().absolute()


def _export_saved(
    model: nn.Module,
    path: StrPath,
    dtype: str,
    opt: DistributedOptimizer,
    base: StrPath | None,
    averaged: bool,
) -> None:
    """Saves a snapshot and exports that. Trainer 0 alone looks at exports."""
    snapshots: Snapshots | None = opt.snapshots
    if snapshots is None:
        raise SnapshotError(
            "export: the rows of remote tables come from a snapshot, and nobody has "
            "said where those are. Call opt.resume(directory) once, after wrapping; or "
            "pass snapshot=, the path of one."
        )
    if averaged and opt.average is None:
        raise _no_average()
    # Static tables that are beside the remote ones come together.
    opt.flush("all" if opt.leads else "none")
    chains: list[Sequence[Export]] = []

    def check() -> dict[str, Any]:
        chains.append(_checked(model, path, dtype, base, averaged))
        return {}

    snapshots.by_leader("check", check)
    name = opt.save_snapshot()
    folder = snapshots.directory.folder(name)

    def write() -> dict[str, Any]:
        _write_snapshot(model, path, dtype, folder, chains[0], averaged, named=False)
        return {}

    snapshots.by_leader("write", write)


def _no_average() -> InvalidArgumentError:
    return InvalidArgumentError(
        "export: averaged=True, and no average is kept. Build the "
        "DistributedOptimizer with average=cpudist.EMA(0.999)."
    )


def _write_snapshot(
    model: nn.Module,
    path: StrPath,
    dtype: str,
    folder: Path,
    bases: Sequence[Export],
    averaged: bool,
    named: bool,
) -> None:
    """Exports the values of a snapshot."""
    values = SnapshotValues(Snapshot(folder), averaged)
    tensors, tables = values.tensors(model, named)
    remote = values.remote_tables(model)
    manifest = Manifest(
        new_id(),
        dtype,
        averaged,
        values.manifest.version,
        values.manifest.name,
        tables=tuple(remote),
    )
    check_goes_on(folder_of(path), manifest, bases)
    writer = Writer(path, manifest, bases=bases)
    for index, table in enumerate(remote):
        rows = writer.add_table(index, values.runs(table.name))
        logger.info("export: %d rows of table %r", rows, table.name)
    writer.add_model(tensors, tables)
    writer.commit()


def _export_own(
    model: nn.Module,
    path: StrPath,
    dtype: str,
    opt: DistributedOptimizer,
    base: StrPath | None,
    averaged: bool,
) -> None:
    """Exports the model's own values, as the servers have them."""
    if averaged and opt.average is None:
        raise _no_average()
    # First: what is checked has the values of tables, which come together then.
    opt.flush()
    bases = _checked(model, path, dtype, base, averaged) if opt.leads else ()
    entered = opt.averaged() if averaged else contextlib.nullcontext()
    with entered:
        if opt.leads:
            counted = opt.counted.counters()
            version = Version(counted["rounds"], counted["samples"], counted["steps"])
            _write_own(model, path, dtype, bases, averaged, version)


def _write_own(
    model: nn.Module,
    path: StrPath,
    dtype: str,
    bases: Sequence[Export],
    averaged: bool,
    version: Version,
) -> None:
    remote = [place.name for place in remote_places(model)]
    if remote:
        raise RemoteTableError(
            f"export: the rows of remote tables {remote} are not in this model, and no "
            "optimizer of this process trains it. Export where it is trained; or pass "
            "snapshot=, the path of one."
        )
    if averaged and not version.round:
        raise _no_average()
    manifest = Manifest(new_id(), dtype, averaged, version)
    check_goes_on(folder_of(path), manifest, bases)
    writer = Writer(path, manifest, bases=bases)
    writer.add_model(plain_tensors(model), _table_names(model))
    writer.commit()


def _table_names(model: nn.Module) -> list[str]:
    """Names of weights with rows here that are tables, or could be; all of each."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            weight = module.weight
            table = module.sparse or binding_of(module) is not None
            if table and weight.dtype == torch.float32:
                found.add(id(weight))
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if id(parameter) in found]
