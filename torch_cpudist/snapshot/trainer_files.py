# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The files of a trainer's own state: a tree in JSON, and its tensors beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_cpudist import _core
from torch_cpudist.errors import SnapshotCorruptError
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.checked_json import Fields, Malformed, parse
from torch_cpudist.snapshot.files import Files, reported, write_durably
from torch_cpudist.snapshot.manifest import Trainer
from torch_cpudist.snapshot.mapped import Mapped
from torch_cpudist.snapshot.tensors import ITEM_BYTES, make_header
from torch_cpudist.snapshot.trees import Packed, leaf_of, unpack

_FORMAT = "torch_cpudist.trainer"
_TENSORS = "torch_cpudist.tensors"
_VERSION = 1
_FILE_SYSTEM = Files()


def write_trainer(
    folder: Path,
    rank: int,
    packed: Packed,
    steps: int,
    files: Files = _FILE_SYSTEM,
    number: int = 0,
    run_id: int | None = None,
    make: bool = True,
) -> Trainer:
    """Writes the state of a trainer to the directory of a snapshot; the JSON last.

    When the JSON is there, both files outlive a crash. May run in a thread of its own.

    Args:
        folder: of the snapshot.
        rank: the trainer's.
        packed: its state.
        steps: that it has made.
        files: the file system.
        number: of the cut.
        run_id: of the run, by which the file is told from that of another run.
        make: the directory is made if it is missing; else that is an error.

    Returns:
        What the manifest says of it.

    Raises:
        SnapshotError: the file system refuses.
    """
    data = folder / names.trainer_name(rank, "safetensors")
    text = folder / names.trainer_name(rank)
    # Those of large elements first: then all are aligned in the file.
    order = sorted(
        packed.leaves, key=lambda name: -ITEM_BYTES[packed.leaves[name].dtype]
    )
    leaves = {name: packed.leaves[name] for name in order}
    head, _ = make_header(
        {name: (leaf.dtype, leaf.shape) for name, leaf in leaves.items()},
        {"format": _TENSORS, "version": str(_VERSION)},
    )
    pieces: list[bytes | memoryview] = [head]
    pieces += [leaf.contents.data for leaf in leaves.values()]
    checksum = 0
    for piece in pieces:
        checksum = _core.crc32c(piece, checksum)
    entry = {
        "format": _FORMAT,
        "version": _VERSION,
        "rank": rank,
        "number": str(number),
        **({} if run_id is None else {"run": names.run_text(run_id)}),
        "steps": str(steps),
        "tensors": {
            "file": data.name,
            "bytes": sum(len(piece) for piece in pieces),
            "crc32c": f"{checksum:08x}",
        },
        "state": packed.tree,
    }
    contents = json.dumps(entry, allow_nan=False).encode() + b"\n"
    with reported(
        f"snapshot {folder.name}: cannot write {text.name} in {folder}",
        "Make the directory writable and see that there is space.",
    ):
        if make:
            files.make_directory(folder)
        write_durably(files, data, pieces)
        write_durably(files, text, [contents])
    return Trainer(rank, text.name, len(contents), _core.crc32c(contents), steps)


def read_written(
    folder: Path,
    rank: int,
    files: Files = _FILE_SYSTEM,
    number: int | None = None,
    run_id: int | None = None,
) -> Trainer | None:
    """What the manifest will say of a trainer's files, from the files.

    Trainer 0 asks so for those of the others, until all are there.

    Args:
        folder: of the snapshot.
        rank: the trainer's.
        files: the file system.
        number: of the cut; the file of another one, which an earlier attempt of the
            same name has left, is none. ``None`` takes any.
        run_id: of the run; the file of another one, which was killed before it could
            commit, is none. ``None`` takes any.

    Returns:
        ``None`` while the trainer has not written its file.

    Raises:
        SnapshotCorruptError: the file is not one of that trainer.
        SnapshotError: the file system refuses.
    """
    path = folder / names.trainer_name(rank)
    with reported(
        f"snapshot {folder.name}: cannot read {path}", "See that it can be read."
    ):
        if files.size(path) is None:
            return None
        contents = files.read(path)
    try:
        fields = _head(contents, rank)
        found = fields.long("number")
        steps = fields.long("steps")
        run = _run_of(fields)
    except Malformed as error:
        raise SnapshotCorruptError(
            f"snapshot {folder.name}: {path.name} is damaged: {error}", path.name
        ) from error
    if number is not None and found != number:
        return None
    if run_id is not None and run != names.run_text(run_id):
        return None
    return Trainer(rank, path.name, len(contents), _core.crc32c(contents), steps)


def _head(contents: bytes | memoryview, rank: int) -> Fields:
    """The fields of the JSON behind those that say what it is."""
    fields = Fields(parse(contents), "trainer")
    fields.text("format", _FORMAT)
    fields.number("version", _VERSION, _VERSION)
    fields.number("rank", rank, rank)
    return fields


def _run_of(fields: Fields) -> str | None:
    """The id of the run as text; ``None`` in files of before there was one."""
    return fields.text("run", "[0-9a-f]{16}") if fields.has("run") else None


def read_trainer(folder: Path, trainer: Trainer, files: Files = _FILE_SYSTEM) -> Any:
    """Reads the state tree of a trainer.

    Args:
        folder: of the snapshot.
        trainer: what its manifest says of the file.
        files: the file system.

    Raises:
        SnapshotCorruptError: one of its two files is not as it was written.
        SnapshotError: the file system refuses.
    """
    with reported(
        f"snapshot {folder.name}: cannot read {folder / trainer.file}",
        "See that it can be read.",
    ):
        text, data, tree = open_trainer(folder, trainer, files)
        tensors = data.header().tensors
        leaves = {
            name: leaf_of(stored, data.view(stored.begin, stored.end))
            for name, stored in tensors.items()
        }
    try:
        return unpack(tree, leaves)
    except Malformed as error:
        raise text.damaged(str(error)) from error


def open_trainer(
    folder: Path, trainer: Trainer, files: Files = _FILE_SYSTEM
) -> tuple[Mapped, Mapped, Any]:
    """Opens both files of a trainer.

    Returns:
        The JSON, checked; the tensors, not yet; and the tree as JSON has it.

    Raises:
        SnapshotCorruptError: the JSON is not as it was written, or the other file is
            not there or of another size.
    """
    path = folder / trainer.file
    text = Mapped(files, path, trainer.bytes, [trainer.crc32c], max(trainer.bytes, 1))
    try:
        fields = _head(text.view(0, text.size_bytes), trainer.rank)
        fields.long("number")
        _run_of(fields)
        fields.long("steps", trainer.steps, trainer.steps)
        tensors = Fields(fields.take("tensors"), "trainer.tensors")
        tree = fields.take("state")
        fields.done()
        name = names.trainer_name(trainer.rank, "safetensors")
        beside = folder / tensors.text("file", name.replace(".", r"\."))
        size = tensors.number("bytes", 10, 2**53)
        checksum = int(tensors.text("crc32c", "[0-9a-f]{8}"), 16)
        tensors.done()
    except Malformed as error:
        raise text.damaged(str(error)) from error
    return text, Mapped(files, beside, size, [checksum], size), tree
