# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes a file of dense blocks where no server does: where trainers hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.checksums import chunk_checksums
from torch_cpudist.snapshot.entries import File
from torch_cpudist.snapshot.files import Files, reported, write_durably
from torch_cpudist.snapshot.tensors import ITEM_BYTES, make_header

FORMAT = "torch_cpudist.dense"
VERSION = "1"
# By the name of numpy's dtype.
_DTYPES = {"float32": "F32", "float64": "F64"}

Values = npt.NDArray[Any]


def write_dense(
    folder: Path,
    blocks: Mapping[str, Values],
    files: Files,
    server: int = 0,
    states: Mapping[str, Values] | None = None,
) -> File:
    """Writes dense blocks to the directory of a snapshot.

    Args:
        folder: of the snapshot; made if it is missing.
        blocks: weights by name, float32 or float64, of one dimension.
        files: the file system.
        server: in whose file they are looked for.
        states: of those that have any, by name and of the block's dtype: its parts one
            after the other.

    Returns:
        What the manifest says of it.

    Raises:
        SnapshotError: the file system refuses.
    """
    path = folder / str(names.PartName(server, None))
    tensors = {f"{name}.weight": values for name, values in blocks.items()}
    tensors |= {f"{name}.state": values for name, values in (states or {}).items()}
    kinds = {name: _DTYPES[values.dtype.name] for name, values in tensors.items()}
    # Those of large elements first: then all are aligned in the file.
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[kinds[name]])
    head, _ = make_header(
        {name: (kinds[name], tensors[name].shape) for name in order},
        {"format": FORMAT, "version": VERSION},
    )
    pieces = [memoryview(head)]
    pieces += [np.ascontiguousarray(tensors[n]).view(np.uint8).data for n in order]
    with reported(
        f"snapshot {folder.name}: cannot write {path.name} in {folder}",
        "Make the directory writable and see that there is space.",
    ):
        files.make_directory(folder)
        write_durably(files, path, pieces)
    checksums, size = chunk_checksums(pieces)
    return File(path.name, size, None, 0, checksums)
