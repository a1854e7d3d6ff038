# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An export opened, and the chain of exports that a delta belongs to.

Every file is mapped, and nothing of it is used before its checksum was found right.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import torch

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.exports import names
from torch_cpudist.exports.manifest import File, Manifest
from torch_cpudist.exports.rows_file import RowsFile
from torch_cpudist.snapshot.entries import CHUNK_BYTES
from torch_cpudist.snapshot.files import Files, reported
from torch_cpudist.snapshot.mapped import Mapped
from torch_cpudist.snapshot.merging import Layer
from torch_cpudist.snapshot.trees import TORCH, leaf_of, unpack

_FILE_SYSTEM = Files()
MODEL_FORMAT = "torch_cpudist.export.model"
MODEL_VERSION = "1"
#: Behind the name of rows of int8: their scales.
SCALE = ".scale"
_READABLE = "See that it can be read on this host."


class Export:
    """One export, for reading. Thread safety: any number of threads.

    Args:
        path: its directory.
        files: the file system.

    Raises:
        SnapshotError: there is no export, or it is of a later format.
        SnapshotCorruptError: its manifest is damaged, or a file is not there or of
            another size.
    """

    def __init__(
        self, path: str | os.PathLike[str], files: Files = _FILE_SYSTEM
    ) -> None:
        self.folder = names.folder_of(path)
        self.files = files
        place = self.folder / names.MANIFEST
        with reported(f"cannot read {place}", _READABLE):
            if files.size(place) is None:
                raise SnapshotError(
                    f"{self.folder} is no export: it has no {names.MANIFEST}, which is "
                    "written last. cpudist.export(model, path) makes one."
                )
            contents = files.read(place)
        self.manifest = Manifest.from_json(contents, self.folder.name)
        with reported(f"cannot read files of {self.folder}", _READABLE):
            self._mapped = {f.name: self._map(f) for f in self.manifest.files}

    def _map(self, file: File) -> Mapped:
        table = "" if file.table is None else self.manifest.tables[file.table].name
        return Mapped(
            self.files,
            self.folder / file.name,
            file.bytes,
            file.crc32c,
            CHUNK_BYTES,
            table,
            kind="export",
        )

    # ---- rows ----------------------------------------------------------------------

    def rows_files(self, table: int) -> list[RowsFile]:
        """The files of a table, with keys that are gone too.

        Raises:
            SnapshotCorruptError: the header of one is not as it was written.
        """
        return [self._rows_file(file) for file in self.manifest.table_files(table)]

    def _rows_file(self, file: File) -> RowsFile:
        manifest = self.manifest
        table = manifest.tables[file.table or 0]
        return RowsFile(file, table, manifest.dtype, self._mapped[file.name])

    def layer(self, name: str) -> Layer:
        """What it says of a table, for ``snapshot.merging``.

        Raises:
            SnapshotCorruptError: a file is not as it was written.
        """
        index = self.manifest.table_index(name)
        found = [] if index is None else self.rows_files(index)
        gone = [one.column("keys") for one in found if one.gone]
        keys = np.concatenate([np.empty(0, np.int64), *gone])
        return Layer([one for one in found if not one.gone], keys)

    # ---- the model -----------------------------------------------------------------

    @property
    def model(self) -> Mapped:
        """The file of all that is in no files of rows.

        Raises:
            SnapshotCorruptError: its header is not as it was written.
        """
        mapped = self._mapped[names.MODEL]
        metadata = mapped.header().metadata
        known = (metadata.get("format"), metadata.get("version"))
        if known != (MODEL_FORMAT, MODEL_VERSION):
            raise mapped.damaged(
                f"expected {MODEL_FORMAT} version {MODEL_VERSION}, found {known}"
            )
        return mapped

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``tensors`` returns, by name."""
        stored = self.model.header().tensors
        return {n: one.shape for n, one in stored.items() if not self._scales(n)}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of what ``tensors`` returns, by name."""
        stored = self.model.header().tensors
        found = {}
        for name in self.shapes():
            scaled = name + SCALE in stored
            found[name] = torch.float32 if scaled else TORCH[stored[name].dtype]
        return found

    def check_tensors(self, names: Collection[str]) -> None:
        """Reads and checks the bytes of some of the model's file.

        Raises:
            SnapshotCorruptError: one is not as it was written.
        """
        mapped = self.model
        for name, one in mapped.header().tensors.items():
            if name in names or name.removesuffix(SCALE) in names:
                mapped.view(one.begin, one.end)

    def tensors(
        self, names: Collection[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of what is in no files of rows, one after the other.

        Rows of int8 come as float32; all else in the dtype of the file.

        Args:
            names: only these; ``None``: all.

        Raises:
            SnapshotCorruptError: the file is not as it was written.

        Cost: memory for one at a time.
        """
        mapped = self.model
        stored = mapped.header().tensors
        for name in self.shapes():
            if names is not None and name not in names:
                continue
            one = stored[name]
            leaf = leaf_of(one, mapped.view(one.begin, one.end))
            value: torch.Tensor = unpack({"$tensor": "t"}, {"t": leaf})
            if name + SCALE in stored:
                scales = stored[name + SCALE]
                unit = leaf_of(scales, mapped.view(scales.begin, scales.end))
                scale: torch.Tensor = unpack({"$tensor": "t"}, {"t": unit})
                value = value.to(torch.float32) * scale.reshape(-1, 1)
            yield name, value

    def _scales(self, name: str) -> bool:
        """Whether a tensor of the model's file is the scales of another one's rows.

        No model has a tensor by the name of another one and something behind it.
        """
        rows = name.removesuffix(SCALE)
        return rows != name and rows in self.model.header().tensors

    # ---- all of it -----------------------------------------------------------------

    def check(self) -> None:
        """Reads and checks every byte.

        Raises:
            SnapshotCorruptError: one is not as it was written.
        """
        for error in self.verify():
            raise error

    def verify(self) -> list[SnapshotCorruptError]:
        """Reads and checks every byte, and that rows are where they belong.

        Returns:
            What is wrong, a file each; empty if nothing is.
        """
        found = []
        for file in self.manifest.files:
            try:
                if file.table is None:
                    self.model.check_all()
                else:
                    self._rows_file(file).check()
            except SnapshotCorruptError as error:
                found.append(error)
        return found


def _beside(delta: Path, name: str, files: Files) -> Path:
    """Where the base of a delta is: beside it, or beside what a link to it is of."""
    for parent in (delta.parent, delta.resolve().parent):
        with reported(f"cannot read {parent / name}", _READABLE):
            if files.size(parent / name / names.MANIFEST) is not None:
                return parent / name
    return delta.parent / name


def chain(
    path: str | os.PathLike[str], files: Files = _FILE_SYSTEM
) -> tuple[Export, ...]:
    """An export and those that it is a delta of, the whole one first.

    Deltas lie beside their base: it is looked for, by its name, in the directory that
    the delta's own directory is in.

    Raises:
        SnapshotError: one of them is not there, or it is another one by now.
        SnapshotCorruptError: one is damaged.
    """
    found = [Export(path, files)]
    while (base := found[0].manifest.base) is not None:
        delta = found[0].folder
        beside = _beside(delta, base.name, files)
        try:
            export = Export(beside, files)
        except SnapshotCorruptError:
            raise
        except SnapshotError as error:
            raise SnapshotError(
                f"export {delta.name} has only what changed since {base.name}, which "
                f"has to lie beside it: {error}"
            ) from error
        if export.manifest.id != base.id:
            raise SnapshotError(
                f"export {delta.name} has only what changed since {base.name} of id "
                f"{base.id}, and {beside} has {export.manifest.id}: it was made anew. "
                "Export the model as a whole again."
            )
        if any(one.manifest.id == base.id for one in found):
            raise SnapshotError(f"export {delta.name} is a delta of itself")
        found.insert(0, export)
    return tuple(found)
