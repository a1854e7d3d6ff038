# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one thread and what it is told, which is one lock's
"""Writing snapshots in the background: a trainer's own file, and the commit by one."""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from torch_cpudist.drivers.saving import CutAnswer, Saving, Written
from torch_cpudist.errors import Error, SnapshotError, describe
from torch_cpudist.log import logger
from torch_cpudist.resuming.absent import Absent, NotOfAll
from torch_cpudist.resuming.copies import Copies, remember
from torch_cpudist.snapshot import names, trees
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.manifest import Base, Manifest, Trainer
from torch_cpudist.snapshot.store import Store
from torch_cpudist.snapshot.trainer_files import read_written, write_trainer

_FIRST_POLL_S = 0.005
_LAST_POLL_S = 0.25
# A twentieth of what it has taken may be missed; a server answers in microseconds.
_POLL_SHARE = 0.05
# Of others' files, once everything else is there: all captured theirs at one moment.
TRAINER_FILES_S = 120.0
# How often servers are asked whether others are there, whose files are awaited.
_PRESENCE_S = 1.0
# So many failures in a row are raised.
MOST_FAILED = 3
# After so many in a row that were not taken it is told.
_SKIPS_TOLD = (3, 10, 100, 1000)
# Snapshots that others commit, of which that is looked for.
_MOST_UNSEEN = 32
# So many are written at a time: servers forget cuts that wait longer.
_MOST_OPEN = 2


@dataclass(frozen=True)
class Tip:
    """The snapshot that the next one of changes is put over.

    Attributes:
        number: of its cut.
        base: how it is named.
        members: of its chain, itself included.
    """

    number: int
    base: Base
    members: int


@dataclass
class Save:
    """A snapshot that this trainer takes part in.

    Attributes:
        number: of its cut.
        steps: of this trainer until then.
        tree: the trainer's own state.
        began: when it was marked, by the monotonic clock.
        answer: what came of the mark; ``None`` until then.
        whole: nothing of ``tree`` is to come.
        leads: this trainer commits it.
        base: what was marked to have the changes since it; ``None``: all rows.
        given_up: it is only to be removed.
        name: of the snapshot, from who marks it so; empty where another trainer does.
        until: when it is given up where others do not come, by the monotonic clock; 0:
            the mark keeps this trainer waiting until servers give it up.
    """

    number: int
    steps: int
    tree: dict[str, Any]
    began: float
    answer: CutAnswer | None = None
    whole: bool = True
    leads: bool = False
    base: Tip | None = None
    given_up: bool = False
    name: str = ""
    until: float = 0.0


@dataclass(frozen=True)
class Counts:
    """What came of snapshots so far; see ``DistributedOptimizer.stats``."""

    parts: int = 0
    saved: int = 0
    deltas: int = 0
    failed: int = 0
    skipped: int = 0
    last: str | None = None
    last_s: float = 0.0
    in_a_row: int = field(default=0, repr=False)

    def shown(self) -> dict[str, Any]:
        """What of them ``stats`` has."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.repr}


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Options of parameter groups that JSON can say, for people and other programs.

    What trainers go on with are those of their own files.
    """
    return tuple(
        {
            key: plain
            for key, one in group.items()
            if (plain := _plain(one)) is not _NONE
        }
        for group in groups
    )


_NONE = object()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):
        items = [_plain(one) for one in value]
        return _NONE if any(one is _NONE for one in items) else items
    if isinstance(value, float) and not math.isfinite(value):
        return _NONE
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _NONE


def _poll_s(waited_s: float) -> float:
    """How long until the next look, of who has waited so long."""
    return min(max(_FIRST_POLL_S, _POLL_SHARE * waited_s), _LAST_POLL_S)


class _Look:
    """Something was marked, whose answer comes later."""


class _NotInTime(SnapshotError):
    """A trainer has not written its part: an evaluation, or it says why itself."""


class Saves:
    """Writes what it is given, one after the other, in a thread of its own.

    Thread safety: ``put`` and ``skip`` from this thread, too; ``watch``, ``wait``,
    ``close`` from the thread that steps.
    """

    def __init__(
        self,
        directory: Directory,
        rank: int,
        saving: Saving,
        describe_run: Callable[[], Manifest],
        keep: int,
        absent: Absent,
        limit_s: float,
        run_id: int,
        marked: Callable[[], Sequence[Save]] = tuple,
        look: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts no thread yet.

        Args:
            directory: where snapshots are.
            rank: this trainer's.
            saving: of the driver.
            describe_run: the manifest but for what was written.
            keep: snapshots that stay.
            absent: what snapshots have of trainers that have no part in them.
            limit_s: how long servers may write.
            run_id: of the run: what another one has left in a directory is not taken.
            marked: those that are marked and were not put yet; any thread.
            look: puts those of them that are answered, from the thread that writes;
                returns whether there are others.
        """
        self._copies: Copies | None = None
        self._marked = marked
        self._look = look
        self._looks_since: float | None = None
        self._limit_s = limit_s
        self._run_id = run_id
        self.absent = absent
        self._presence_at = 0.0  # when servers are asked next who is there
        self._said_lost: set[frozenset[int]] = set()  # trainers, by warning
        self._skipped_in_a_row = 0
        self._directory = directory
        self._rank = rank
        self._saving = saving
        self._describe_run = describe_run
        self._keep = keep
        # What to write; to look for more; or, ``None``, to end.
        self._waiting: queue.SimpleQueue[Save | _Look | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._changed = threading.Condition()
        self._open: list[Save] = []
        self._counts = Counts()
        # Own parts are there; whether the trainer that commits it has is not known.
        self._unseen: deque[str] = deque(maxlen=_MOST_UNSEEN)
        self._error: Error | None = None
        self._errors: dict[str, Error] = {}
        self.why = ""  # the last one was not taken
        # What was committed last, if it has a name made here; on trainer 0.
        self.tip: Tip | None = None

    # -- the thread that steps ---------------------------------------------------------

    def copy_to(self, store: Store) -> None:
        """Has what this trainer commits copied there from now on."""
        self._copies = Copies(store, self._directory, self._keep)

    def go_on_from(self, before: Saves, store: Store | None) -> None:
        """Goes on counting, and copying, where another one has ended after a loss.

        Of its servers it is not known what they count that no trainer does.
        """
        if store is not None:
            self.copy_to(store)
        self._counts = replace(before._counts, in_a_row=0)
        self._unseen.extend(before._unseen)
        self.absent.uncounted = None

    @property
    def copied(self) -> dict[str, int]:
        """What came of copies to a store, for ``stats``; nothing without one."""
        if self._copies is None:
            return {}
        copies = self._copies
        return {
            "copied": copies.copied,
            "not_copied": copies.failed,
            "passed_over": copies.passed_over,
        }

    @property
    def counts(self) -> Counts:
        """As of now."""
        return self._counts

    @property
    def writing(self) -> bool:
        """Whether something is being written."""
        return bool(self._open)

    @property
    def busy(self) -> bool:
        """Whether something is being written, or copied to a store."""
        return self.writing or (self._copies is not None and self._copies.busy)

    def check(self) -> None:
        """Raises what has kept snapshots from being saved, if it did several times.

        Raises:
            SnapshotError: the newest of the failures.
        """
        with self._changed:
            if self._counts.in_a_row < MOST_FAILED or self._error is None:
                return
            error, count = self._error, self._counts.in_a_row
            self._counts = replace(self._counts, in_a_row=0)
        raise SnapshotError(
            f"{count} snapshots in a row could not be saved; the last one: {error}"
        ) from error

    def skip(self, why: str) -> None:
        """Counts one that was not taken; many in a row are a warning."""
        with self._changed:
            self._skipped_in_a_row += 1
            count = self._skipped_in_a_row
            self.why = why
            self._counts = replace(self._counts, skipped=self._counts.skipped + 1)
        tell = logger.warning if count in _SKIPS_TOLD else logger.info
        tell("no snapshot, the %d. time in a row: %s", count, why)

    def put(self, save: Save) -> bool:
        """Has it written, and committed by its leader.

        Who commits does without where several are being written still: no other trainer
        can know that, and all have marked it already.

        Returns:
            Whether it is written; else its cut is to be abandoned.
        """
        with self._changed:
            writing = [one for one in self._open if not one.given_up]
            save.given_up = save.leads and len(writing) >= _MOST_OPEN
            self._open.append(save)
        if save.given_up:
            self.skip(f"{len(writing)} before it are still being written")
        self._started()
        self._waiting.put(save)
        return not save.given_up

    def watch(self) -> None:
        """Something was marked: its answer is looked for while no step comes, too."""
        self._started()
        self._waiting.put(_Look())

    def _started(self) -> None:
        if self._thread is None:
            self._ending.clear()
            name = f"snapshots of trainer {self._rank}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def wait(self, name: str, timeout_s: float, check: Callable[[], None]) -> None:
        """Returns when a snapshot that was put is written, and committed if it leads.

        Where there is a store it is there then, too, if it leads.

        Raises:
            SnapshotError: it failed, or is not done in time.
        """
        self.drain(timeout_s, check, copies=True)
        copied = None if self._copies is None else self._copies.error(name)
        if (error := self._errors.get(name) or copied) is not None:
            raise SnapshotError(f"snapshot {name!r} was not saved: {error}") from error

    def drain(
        self, timeout_s: float, check: Callable[[], None], copies: bool = False
    ) -> None:
        """Returns when everything that was put is written, or has failed.

        Args:
            timeout_s: how long that may take.
            check: called now and then.
            copies: also when it is copied to the store.

        Raises:
            SnapshotError: it is not in time.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._open:
                if time.monotonic() > until:
                    raise SnapshotError(
                        f"a snapshot was not written within {timeout_s:g} s"
                    )
                self._changed.wait(0.05)
                check()
        waits = self._copies if copies else None
        while waits is not None and not waits.wait(0.05):
            if time.monotonic() > until:
                raise SnapshotError(f"a snapshot was not copied within {timeout_s:g} s")
            check()

    def close(self, timeout_s: float) -> None:
        """Ends the thread; what is being written gets so long. Idempotent."""
        if self._thread is None:
            return
        try:
            self.drain(timeout_s, lambda: None, copies=True)
        except SnapshotError as error:
            logger.warning("%s: it is given up.", error)
        self._ending.set()
        self._waiting.put(None)
        self._thread.join(10.0)
        self._thread = None
        if self._copies is not None:
            self._copies.close()

    # -- the thread that writes --------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                save = self._waiting.get(timeout=self._look_again_s())
            except queue.Empty:
                continue
            if save is None:
                return
            if isinstance(save, Save):
                self._take(save)

    def _look_again_s(self) -> float | None:
        """Looks for answers; when to do so next, where any are awaited."""
        if not self._look():
            self._looks_since = None
            return None
        now = time.monotonic()
        if self._looks_since is None:
            self._looks_since = now
        return _poll_s(now - self._looks_since)

    def _take(self, save: Save) -> None:
        name = "" if save.answer is None else save.answer.name
        try:
            if not save.given_up:
                self._write(save, name)
        except _NotInTime as error:
            self._drop(save, name)
            self._left_out(name, error)
        except NotOfAll as error:
            self._drop(save, name)
            self._left_out(name, error, error.lost)
        except SnapshotError as error:
            self._drop(save, name)
            if self._was_removed(save, name):
                self._left_out(name, error, frozenset())
            else:
                self._failed(name, error)
        except Exception as error:  # training goes on whatever it is
            self._drop(save, name)
            self._failed(name, error)
        else:
            if save.given_up:
                self._drop(save, name)  # behind what others have written of it
            else:
                took_s = time.monotonic() - save.began
                self._succeeded(save, name, took_s)
        with self._changed:
            self._open.remove(save)
            self._changed.notify_all()

    def _succeeded(self, save: Save, name: str, took_s: float) -> None:
        what = "saved" if save.base is None else f"changes since {save.base.base.name}"
        if not save.leads:
            what = f"trainer {self._rank}'s own part written"
        logger.info("snapshot %s: %s in %.2f s", name, what, took_s)
        with self._changed:
            self._skipped_in_a_row = 0
            self._errors.pop(name, None)
            counts = replace(self._counts, parts=self._counts.parts + 1, in_a_row=0)
            if save.leads:
                counts = replace(
                    counts,
                    saved=counts.saved + 1,
                    deltas=counts.deltas + (save.base is not None),
                    last=name,
                    last_s=took_s,
                )
            else:
                self._unseen.append(name)
            self._counts = counts

    def look_for_commits(self) -> None:
        """Counts what other trainers have committed since, of which parts are here.

        Any thread. Cost: a look at a file for each one that was not seen yet.
        """
        for name in list(self._unseen):
            try:
                found = self._directory.is_there(name)
            except SnapshotError:
                continue
            with self._changed:
                if found is False or name not in self._unseen:
                    continue
                self._unseen.remove(name)
                if found:  # else it was given up, or removed before it was seen
                    saved = self._counts.saved + 1
                    self._counts = replace(self._counts, saved=saved, last=name)

    def _failed(self, name: str, error: Exception) -> None:
        if not isinstance(error, Error):
            error = SnapshotError(f"snapshot {name}: {describe(error)}")
        self._look_for_tip()
        logger.warning(
            "snapshot %s was not saved, training goes on: %s", name, describe(error)
        )
        with self._changed:
            self._error = error
            remember(self._errors, name, error)
            counts = self._counts
            self._counts = replace(
                counts, failed=counts.failed + 1, in_a_row=counts.in_a_row + 1
            )

    def _drop(self, save: Save, name: str) -> None:
        if not save.leads:
            return
        with contextlib.suppress(Error):
            self._saving.abandon(save.number)
        with contextlib.suppress(Error):
            if name not in self._directory.names():
                self._directory.remove(name)

    def _look_for_tip(self) -> None:
        """Where what the next one would be put over is gone, that one has all rows."""
        tip = self.tip
        if tip is None:
            return
        try:
            found = self._directory.manifest(tip.base.name).crc32c
        except SnapshotError:
            found = None
        if found != tip.base.crc32c:
            self.tip = None

    def _was_removed(self, save: Save, name: str) -> bool:
        """Whether who commits it has given it up before this trainer's file came."""
        return not save.leads and not self._directory.files.list(
            self._directory.folder(name)
        )

    def _left_out(
        self, name: str, error: SnapshotError, lost: frozenset[int] | None = None
    ) -> None:
        """Counts one that was given up; a warning, once where ``lost`` is the same."""
        tell = logger.info if lost in self._said_lost else logger.warning
        tell("no snapshot, training goes on: %s", error)
        if lost is not None:
            self._said_lost.add(lost)
        with self._changed:
            remember(self._errors, name, error)
            self.why = str(error)  # who asks for this one may see that it was counted
            self._counts = replace(self._counts, skipped=self._counts.skipped + 1)

    def _write(self, save: Save, name: str) -> None:
        folder = self._directory.folder(name)
        packed = trees.pack(save.tree, f"state of trainer {self._rank}")
        files = self._directory.files
        self.look_for_commits()
        own = write_trainer(
            folder,
            self._rank,
            packed,
            save.steps,
            files,
            save.number,
            self._run_id,
            make=save.leads,  # else it was there, and goes when this one is given up
        )
        if not save.leads:
            return
        brought = self.absent.bring(save.number, folder)
        written = self._written(save.number, name)
        base = 0 if save.base is None else save.base.number
        if written.base != base:
            raise SnapshotError(
                f"snapshot {name}: servers have written changes since cut "
                f"{written.base}, expected since cut {base} (0: all rows)"
            )
        others = {**brought.left, **brought.kept, self._rank: own}
        trainers = self.absent.settle(
            save.number,
            folder,
            written.version.steps,
            self._trainers(name, save.number, written.members, others),
            brought,
        )
        manifest = replace(
            self._describe_run(),
            name=name,
            number=save.number,
            version=written.version,
            servers=written.servers,
            tables=written.tables,
            dense=written.dense,
            files=written.files,
            trainers=trainers,
            param_groups=plain_groups(save.tree["own"]["groups"]),
            base=None if save.base is None else save.base.base,
        )
        committed = self._directory.commit(manifest)
        if names.number_of(name) is not None:  # others are the user's, to be removed
            members = 1 if save.base is None else save.base.members + 1
            self.tip = Tip(save.number, Base(name, committed.crc32c), members)
        spared = self._bases()
        if self._copies is not None:
            self._copies.put(name, manifest.param_set)
            spared |= self._copies.spared()
        try:
            self._directory.keep(self._keep, manifest.param_set, spared)
        except SnapshotError as error:
            logger.warning("older snapshots stay: %s", error)

    def _bases(self) -> set[str]:
        """What snapshots that are not committed yet are put over."""
        # Marked ones first: they are being written before they are not marked.
        saves = [*self._marked(), *self._open]
        return {save.base.base.name for save in saves if save.base is not None}

    def _until(
        self, what: Callable[[], Any], limit_s: float, late: SnapshotError
    ) -> Any:
        began = time.monotonic()
        while (found := what()) is None:
            if self._ending.is_set():
                raise SnapshotError("the optimizer was closed meanwhile")
            took_s = time.monotonic() - began
            if took_s > limit_s:
                raise late
            self._look()  # others may wait for this trainer's part of the next one
            time.sleep(_poll_s(took_s))
        return found

    def _written(self, number: int, name: str) -> Written:
        found: Written = self._until(
            lambda: self._saving.poll(number),
            self._limit_s,
            SnapshotError(
                f"snapshot {name}: servers have not written it within "
                f"{self._limit_s:g} s"
            ),
        )
        return found

    def _trainers(
        self,
        name: str,
        number: int,
        members: tuple[int, ...],
        found: dict[int, Trainer],
    ) -> tuple[Trainer, ...]:
        folder, files = self._directory.folder(name), self._directory.files
        for rank in members:
            if rank not in found:
                read = functools.partial(
                    read_written, folder, rank, files, number, self._run_id
                )
                found[rank] = self._until(
                    functools.partial(self._part_of, rank, read),
                    TRAINER_FILES_S,
                    _NotInTime(
                        f"trainer {rank} did not write its file to {folder} within "
                        f"{TRAINER_FILES_S:g} s; its own log says why, or it is "
                        "between step() and a schedule's step()"
                    ),
                )
        return tuple(found[rank] for rank in sorted(found))

    def _part_of(self, rank: int, read: Callable[[], Trainer | None]) -> Trainer | None:
        """What a trainer has written; ``None`` while that may come.

        Raises:
            _NotInTime: it is not there any more to write it.
        """
        now = time.monotonic()
        if (found := read()) is not None or now < self._presence_at:
            return found
        self._presence_at = now + _PRESENCE_S
        if self.absent.is_there(rank):
            return None
        if (found := read()) is None:  # it may have ended behind that
            raise _NotInTime(
                f"trainer {rank} was lost, or has ended, before its part was written"
            )
        return found
