# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Copies of committed snapshots to an object store, in a thread of their own."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch_cpudist.errors import Error, SnapshotError, describe
from torch_cpudist.log import logger
from torch_cpudist.snapshot import names
from torch_cpudist.snapshot.chain import chain_of
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.store import Store

_MOST_ERRORS = 64


@dataclass(frozen=True)
class _Copy:
    name: str
    param_set: int
    members: frozenset[str]  # of its chain

    @property
    def gives_way(self) -> bool:
        return names.number_of(self.name) is not None


def remember(errors: dict[str, Error], name: str, error: Error) -> None:
    """Keeps why a snapshot has failed, of so many as somebody may still ask for."""
    errors[name] = error
    while len(errors) > _MOST_ERRORS:
        del errors[next(iter(errors))]


class Copies:
    """Of one optimizer, by who commits its snapshots.

    One that waits gives way to a newer one unless a user gave it its name. What is
    copied brings along what it is put over. Thread safety: any number of threads.

    Args:
        store: where to.
        directory: where from.
        keep: snapshots that stay in the store.
    """

    def __init__(self, store: Store, directory: Directory, keep: int) -> None:
        self._store = store
        self._directory = directory
        self._keep = keep
        self._changed = threading.Condition()
        self._waiting: list[_Copy] = []
        self._copying: _Copy | None = None
        self._thread: threading.Thread | None = None
        self._ending = False
        self._errors: dict[str, Error] = {}
        self.copied = 0
        self.failed = 0
        self.failed_in_a_row = 0
        self.passed_over = 0

    @property
    def busy(self) -> bool:
        """Whether something is being copied, or waits for that."""
        with self._changed:
            return self._copying is not None or bool(self._waiting)

    def error(self, name: str) -> Error | None:
        """Why a snapshot could not be copied, if it was tried."""
        return self._errors.get(name)

    def spared(self) -> set[str]:
        """Snapshots that must not be removed yet."""
        with self._changed:
            copies = [*self._waiting, *([self._copying] if self._copying else [])]
            return {name for copy in copies for name in copy.members}

    def put(self, name: str, param_set: int) -> None:
        """Has a committed snapshot copied; does not raise, whatever becomes of it."""
        try:
            chain = chain_of(self._directory.manifest(name), self._directory.manifest)
        except SnapshotError as error:
            logger.warning("snapshot %s cannot be copied: %s", name, error)
            self._ended(name, error)
            return
        copy = _Copy(name, param_set, frozenset(one.name for one in chain))
        with self._changed:
            for passed in [one for one in self._waiting if one.gives_way]:
                self._waiting.remove(passed)
                self.passed_over += 1
                logger.info(
                    "snapshot %s is not copied to %s: %s is newer",
                    passed.name,
                    self._store.url,
                    name,
                )
            self._waiting.append(copy)
            if self._thread is None:
                self._ending = False
                self._thread = threading.Thread(
                    target=self._run, name="copies of snapshots", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is left to be copied, at most so much later."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._copying is None and not self._waiting, timeout_s
            )

    def close(self) -> None:
        """Ends the thread, behind what it is at. Idempotent."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._ending = True
            self._changed.notify_all()
        if thread is not None:
            thread.join(10.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending or bool(self._waiting))
                if self._ending:
                    return
                self._copying = copy = self._waiting.pop(0)
            error = self._copy(copy)
            with self._changed:
                self._copying = None
                self._ended(copy.name, error)
                self._changed.notify_all()

    def _ended(self, name: str, error: Error | None) -> None:
        with self._changed:
            if error is None:
                self._errors.pop(name, None)
                self.copied += 1
                self.failed_in_a_row = 0
            else:
                remember(self._errors, name, error)
                self.failed += 1
                self.failed_in_a_row += 1

    def _copy(self, copy: _Copy) -> Error | None:
        try:
            self._store.put(self._directory, copy.name)
        except Exception as error:  # training goes on whatever it is
            failed = SnapshotError(
                f"snapshot {copy.name} is in {self._directory.path} only: "
                f"{describe(error)}"
            )
            logger.warning(
                "%s Training goes on. Copies that have failed in a row: %d.",
                failed,
                self.failed_in_a_row + 1,
            )
            return failed
        logger.info("snapshot %s: copied to %s", copy.name, self._store.url)
        try:
            self._store.keep(self._keep, copy.param_set)
        except SnapshotError as error:
            logger.warning("older snapshots stay in %s: %s", self._store.url, error)
        return None
