# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Removes the snapshots of a checkpoint that was replaced, once its successor is there.

Plug-ins such as ``AsyncCheckpointIO`` return before the file is written: until then the
old file is what a restart finds, and it needs its snapshots. So whoever writes in the
end, below all plug-ins that wrap it, does the removing.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from torch_cpudist.integrations.checkpoint_snapshots import KEY, CheckpointSnapshots


class ForgettingIO(CheckpointIO):
    """Another ``CheckpointIO``, after whose writing old snapshots go.

    ``expect`` and ``forget`` are called by the training thread, ``save_checkpoint`` by
    it or by one other, in the same order.

    Args:
        inner: writes, reads and removes.
    """

    def __init__(self, inner: CheckpointIO) -> None:
        self.inner = inner
        self._stale: dict[tuple[str, ...], tuple[CheckpointSnapshots, list[str]]] = {}
        self._lock = threading.Lock()
        self._to_write: Counter[str] = Counter()  # by file
        self._to_remove: dict[str, CheckpointSnapshots] = {}

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
        with self._lock:
            self._to_write[os.fspath(file)] += 1
            self._to_remove.pop(os.fspath(file), None)

    def forget(
        self, snapshots: CheckpointSnapshots, file: str | os.PathLike[str]
    ) -> None:
        """Removes the snapshots of a file that was removed.

        Where the file is still to be written, it goes with them after that: else it
        would be there without them.
        """
        with self._lock:
            if self._to_write[os.fspath(file)]:
                self._to_remove[os.fspath(file)] = snapshots
                return
        snapshots.forget(file)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes, then removes what is replaced.

        Raises:
            SnapshotError: the file system refuses to remove; the checkpoint is written.
        """
        record = checkpoint.get(KEY)
        found = self._stale.pop(tuple(record["names"]), None) if record else None
        removed = None
        try:
            self.inner.save_checkpoint(checkpoint, path, storage_options)
        finally:
            if found is not None:
                removed = self._written(os.fspath(path))
        if removed is not None:
            self.inner.remove_checkpoint(path)
            removed.forget(path)
        elif found is not None:
            snapshots, stale = found
            snapshots.forget(path, stale)

    def _written(self, file: str) -> CheckpointSnapshots | None:
        """One that was expected is there; says whose snapshots go with it, if any."""
        with self._lock:
            self._to_write[file] -= 1
            if self._to_write[file]:
                return None
            del self._to_write[file]
            return self._to_remove.pop(file, None)

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
