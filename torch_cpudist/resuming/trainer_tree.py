# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a trainer's file in a snapshot has: its parts, and by which version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.snapshot.files import Files
from torch_cpudist.snapshot.manifest import Trainer
from torch_cpudist.snapshot.trainer_files import read_trainer

#: Of the tree that is written; docs/snapshot.md, "Trainers", says what it has.
TREE_VERSION = 1
_PARTS = ("counters", "own", "driver")


def tree_of(
    counters: Mapping[str, int], own: Mapping[str, Any], driver: Mapping[str, Any]
) -> dict[str, Any]:
    """The tree of this release."""
    return {
        "version": TREE_VERSION,
        "counters": dict(counters),
        "own": dict(own),
        "driver": dict(driver),
    }


def read_tree(folder: Path, trainer: Trainer, files: Files) -> dict[str, Any]:
    """Reads a trainer's tree as this release has it.

    Trees of before there was a version have none, and are version 1.

    Args:
        folder: of the snapshot.
        trainer: what its manifest says of the file.
        files: the file system.

    Raises:
        SnapshotError: a later release wrote it, or the file system refuses.
        SnapshotCorruptError: a file of it is not as it was written, or no trainer has
            written it.
    """
    tree = read_trainer(folder, trainer, files)
    version = tree.get("version", 1) if isinstance(tree, dict) else None
    if type(version) is int and version > TREE_VERSION:
        raise SnapshotError(
            f"snapshot {folder.name}: {trainer.file} has state of version {version}, "
            f"this release reads versions 1 to {TREE_VERSION}: install the one that "
            "wrote it, or a later one"
        )
    if type(version) is not int or version < 1 or not _has_parts(tree):
        raise SnapshotCorruptError(
            f"snapshot {folder.name}: {trainer.file} has no state of a trainer: "
            f"expected {', '.join(_PARTS)} and a version from 1",
            trainer.file,
        )
    return dict(tree)


def _has_parts(tree: Mapping[str, Any]) -> bool:
    return all(isinstance(tree.get(part), dict) for part in _PARTS)
