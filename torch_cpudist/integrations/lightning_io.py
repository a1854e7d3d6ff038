# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Removes the snapshots of a checkpoint that was replaced, once its successor is there.

Plug-ins such as ``AsyncCheckpointIO`` return before the file is written: until then the
old file is what a restart finds, and it needs its snapshots. So whoever writes in the
end, below all plug-ins that wrap it, does the removing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from torch_cpudist.integrations.checkpoint_snapshots import KEY, CheckpointSnapshots


class ForgettingIO(CheckpointIO):
    """Another ``CheckpointIO``, after whose writing old snapshots go.

    ``expect`` is called by the training thread, ``save_checkpoint`` by it or by one
    other, in the same order.

    Args:
        inner: writes, reads and removes.
    """

    def __init__(self, inner: CheckpointIO) -> None:
        self.inner = inner
        self._stale: dict[tuple[str, ...], tuple[CheckpointSnapshots, list[str]]] = {}

    def expect(
        self,
        snapshots: CheckpointSnapshots,
        file: str | os.PathLike[str],
        names: Sequence[str],
    ) -> None:
        """Notes which snapshots the next checkpoint of a file replaces.

        Those that are made for it after this call are of later checkpoints, and stay.
        """
        stale = [name for name in snapshots.belonging(file) if name not in names]
        self._stale[tuple(names)] = (snapshots, stale)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes, then removes what is replaced.

        Raises:
            SnapshotError: the file system refuses to remove; the checkpoint is written.
        """
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        record = checkpoint.get(KEY)
        found = self._stale.pop(tuple(record["names"]), None) if record else None
        if found is not None:
            snapshots, stale = found
            snapshots.forget(path, stale)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads."""
        read: dict[str, Any] = self.inner.load_checkpoint(path, *args, **kwargs)
        return read

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file."""
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        """Ends what the other began."""
        self.inner.teardown()


def forgets_after_writing(strategy: Any) -> ForgettingIO:
    """Puts a ``ForgettingIO`` around a strategy's innermost ``CheckpointIO``, once."""
    holder = strategy
    found = strategy.checkpoint_io
    while not isinstance(found, ForgettingIO) and hasattr(found, "checkpoint_io"):
        holder, found = found, found.checkpoint_io
    if isinstance(found, ForgettingIO):
        return found
    made = ForgettingIO(found)
    if holder is strategy:
        strategy.checkpoint_io = made
    else:
        # Its setter takes the first one only.
        vars(holder)["_checkpoint_io"] = made
    return made
