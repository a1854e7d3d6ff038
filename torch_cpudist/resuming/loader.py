# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How trainer 0 brings values of snapshots to the servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_cpudist import ranges
from torch_cpudist.drivers.saving import Saving
from torch_cpudist.errors import SnapshotCorruptError, SnapshotError
from torch_cpudist.log import logger
from torch_cpudist.resuming.places import brought, mended, nothing_to_load
from torch_cpudist.resuming.subject import Subject
from torch_cpudist.resuming.trainer_tree import read_tree
from torch_cpudist.resuming.under_way import UnderWay
from torch_cpudist.snapshot.choice import Choice
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.snapshot.staging import Stage
from torch_cpudist.snapshot.store import Store


@dataclass(frozen=True)
class Loader:
    """Loads one snapshot of a directory; on trainer 0, from the thread that steps.

    Both ways return what the other trainers are told: its name, and where it lies.

    Attributes:
        subject: whose values they are.
        saving: as of the servers of now.
        directory: where the snapshots are.
        store: with copies of them, if there is one.
        way: where others may train already, and wait while values change.
    """

    subject: Subject
    saving: Saving
    directory: Directory
    store: Store | None
    way: UnderWay | None

    def load_named(
        self, where: Path | str, choice: Choice, stage: Stage
    ) -> dict[str, Any]:
        """Loads it if all that is needed is whole: there is no way back once begun.

        Raises:
            SnapshotCorruptError: it is damaged, and the store has no copy that is not.
            SnapshotError: it is not there, or not of this model.
        """
        folder = brought(where, stage, self.directory, self.store)
        try:
            return self._load_whole(folder, choice, stage)
        except SnapshotCorruptError:
            if not mended(folder, self.directory, self.store):
                raise
        return self._load_whole(folder, choice, stage)

    def _load_whole(self, folder: Path, choice: Choice, stage: Stage) -> dict[str, Any]:
        snapshot = Snapshot(folder, self.directory.files)
        plan = choice.plan(snapshot.manifest, self.saving.targets())
        sources = {one.source for one in plan.taken.values()}
        damaged = snapshot.verify(None if plan.whole else sources)
        if damaged:
            raise damaged[0]
        return self._load(snapshot, choice, stage)

    def load_newest(self, needed: bool = False, skip: bool = False) -> dict[str, Any]:
        """Loads the newest snapshot that is whole.

        Args:
            needed: there has to be one.
            skip: none is to be loaded.

        Raises:
            SnapshotCorruptError: there are some, and none is whole.
            SnapshotError: there is none that is ``needed``.
        """
        if self.store is not None:
            self.store.probe()
            self.store.sweep(self.subject.run.run_id, self.subject.number)
            if not skip:
                self.store.get_newest(self.directory, self.subject.number)
        damaged: SnapshotError | None = None
        whole = []
        for found in () if skip else self.directory.committed(self.subject.number):
            if found.damage is None:
                whole.append(found.name)
            else:
                # When it was committed is not known: it may have been the newest.
                damaged = damaged or found.damage
                logger.warning("%s It is passed over.", found.damage)
        begun: set[str] = set()
        waiting = [(name, True) for name in whole]
        while waiting:
            name, may_mend = waiting.pop(0)
            folder = self.directory.folder(name)
            try:
                snapshot = Snapshot(folder, self.directory.files)
                plan = Choice().plan(snapshot.manifest, self.saving.targets())
                if not begun <= plan.taken.keys():
                    continue  # some of the damaged one's values would stay
                with Stage(self.directory) as stage:
                    return self._load(snapshot, Choice(), stage)
            except SnapshotCorruptError as error:
                damaged = damaged or error
                if error.partly_loaded:
                    damaged, begun = error, begun | plan.taken.keys()
                if may_mend and mended(folder, self.directory, self.store):
                    waiting.insert(0, (name, False))
                else:
                    logger.warning("%s It is passed over.", error)
        if damaged is not None:
            raise damaged
        if needed:
            raise nothing_to_load(self.directory)
        if self.way is not None:
            self.way.loaded(self.way.grown(None))
        return {"name": None}

    def _load(self, snapshot: Snapshot, choice: Choice, stage: Stage) -> dict[str, Any]:
        began = time.perf_counter()
        manifest = snapshot.manifest
        if choice.only is None and manifest.param_set != self.subject.number:
            raise SnapshotError(
                f"snapshot {manifest.name!r} is of optimizer {manifest.param_set} of "
                f"its run, this is {self.subject.number}, counted from 0"
            )
        plan = choice.plan(manifest, self.saving.targets())
        for trainer in manifest.trainers:
            # Before anything is changed: the others will read theirs then.
            read_tree(snapshot.folder, trainer, snapshot.files)
        with self._others_told(snapshot.folder, choice), ranges.of(ranges.PUSH):
            self.saving.load(snapshot, plan, stage)
        took = time.perf_counter() - began
        logger.info("snapshot %s: loaded in %.2f s", manifest.name, took)
        folder = snapshot.folder
        return {"name": manifest.name, "inside": [folder.parent.name, folder.name]}

    @contextlib.contextmanager
    def _others_told(self, folder: Path, choice: Choice) -> Iterator[None]:
        """Who comes while values change waits until they are there."""
        if self.way is None:
            yield
            return
        grown = self.way.grown(folder, choice.only is None)
        self.way.loading()
        yield
        self.way.loaded(grown)
