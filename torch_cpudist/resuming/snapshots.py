# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: one class, from the call that resumes a run to the end of the last save
"""Snapshots of one optimizer: resuming from the newest, saving now and then."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_cpudist.drivers.saving import Saving
from torch_cpudist.errors import (
    ConfigurationError,
    Error,
    InternalError,
    InvalidArgumentError,
    SnapshotError,
    describe,
)
from torch_cpudist.log import logger
from torch_cpudist.resuming.absent import Absent
from torch_cpudist.resuming.captured import Captured
from torch_cpudist.resuming.loader import Loader
from torch_cpudist.resuming.marking import Marks
from torch_cpudist.resuming.meeting import Meeting
from torch_cpudist.resuming.own_state import OwnState, check_objects
from torch_cpudist.resuming.paces import Often
from torch_cpudist.resuming.places import (
    check_new_name,
    checked_place,
    located,
    nothing_to_load,
)
from torch_cpudist.resuming.recovered import Moments
from torch_cpudist.resuming.saves import Saves
from torch_cpudist.resuming.schedules import Schedules, schedules_of
from torch_cpudist.resuming.subject import Started, Subject
from torch_cpudist.resuming.trainer_tree import read_tree
from torch_cpudist.resuming.under_way import UnderWay
from torch_cpudist.resuming.wanted import Wanted
from torch_cpudist.snapshot import trees
from torch_cpudist.snapshot.choice import Choice
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.left_files import LeftFiles
from torch_cpudist.snapshot.manifest import Trainer
from torch_cpudist.snapshot.staging import Stage
from torch_cpudist.snapshot.store import Store

_POLL_S = 0.02
# How much longer than its own limit whoever commits one may take to tell.
_TOLD_S = 10.0


class Snapshots:
    """Of one optimizer, from ``resume`` on. From the thread that steps.

    Attributes:
        directory: where they are.
    """

    def __init__(
        self,
        subject: Subject,
        path: object,
        often: Often,
        state: object,
        staging: object = None,
    ) -> None:
        """Checks everything and touches nothing.

        Raises:
            InvalidArgumentError, ConfigurationError: see ``checked_place``.
            SnapshotError: the strategy has no snapshots, or none of changes.
        """
        self._subject = subject
        self._run = run = subject.run
        self._saving: Saving = subject.driver.saving
        often.check()
        if often.deltas and not self._saving.deltas:
            raise SnapshotError(
                "resume: delta_every_steps and delta_every_s leave out rows on servers "
                f"that have not changed, and snapshots of {subject.strategy[0]} are "
                "always whole: it has none there, or all may have changed. Pass "
                "every_steps or every_s. Nothing was changed."
            )
        self._often = often
        objects = check_objects(state)
        path, url = checked_place(path, staging, run.environment.snapshot_dir)
        self.directory = Directory(path)
        self._url = url
        self._store: Store | None = None
        self._own = OwnState(
            subject.model, subject.groups, objects, subject.readers, subject.generators
        )
        self._leads = run.trainer_rank == 0
        self._objects = objects
        self._moments = Moments()
        self._marks = Marks(subject, self.directory, often, self._own, self._moments)
        self._begin()
        self._began = (0, time.monotonic())  # at this step
        self._loading = False
        self._half = ""  # why values are of two moments, where they are

    def _begin(self) -> None:
        """Makes what is of one run: servers that come back are another one."""
        run = self._run
        self._saving = self._subject.driver.saving
        self._left = LeftFiles(
            self.directory.path, run.run_id, self._subject.number, self.directory.files
        )
        self._captured = self._capturing(Schedules(schedules_of(self._objects)))
        self._saves = Saves(
            self.directory,
            run.trainer_rank,
            self._saving,
            self._subject.described,
            self._often.keep,
            Absent(self._saving, run.trainer_count, self._left, self._earlier),
            run.environment.round_deadline_ms / 1000,
            run.run_id,
            self._captured.all,
            self._captured.look,
        )
        self._meeting = Meeting(run, self.directory, self._subject.number)
        goes = run.environment.apart is not None and self._saving.comes_and_goes
        way = UnderWay(run, self.directory, self._subject.number)
        self._way = way if goes else None  # where others may train already
        wanted = Wanted(self.directory, run.run_id, self._subject.number)
        self._marks.begin(
            self._saving,
            self._captured,
            self._saves,
            self._meeting,
            wanted if goes and self._leads else None,
        )

    def _earlier(self, rank: int) -> Sequence[tuple[Path, Trainer]]:
        return () if self._way is None else self._way.states(rank)

    def _capturing(self, schedules: Schedules) -> Captured:
        return Captured(
            self._saving,
            lambda: self._saves,
            self._own,
            schedules,
            self.directory,
            self._run.trainer_rank,
        )

    # -- resuming ----------------------------------------------------------------------

    def resume(self, load: bool) -> Started:
        """See ``DistributedOptimizer.resume``. Collective, but where trainers go."""
        newest = functools.partial(self._load_newest, skip=not load)
        if self._way is not None:
            started = self._join(self._way, newest)
            self._began = started.step, time.monotonic()
            return started
        self._open_store()
        self._meeting.meet(self._saving)
        with self._noting_half():
            found = self._meeting.decided(newest)
        if found["name"] is None:
            return Started()
        return self._go_on(self.directory.folder(found["name"]), Choice())

    def _join(self, way: UnderWay, newest: Callable[[], object]) -> Started:
        """Goes on with the values on the servers, which others may train already."""
        if self._url is not None:
            self._store = Store(self._url)
            self._saves.copy_to(self._store)
        way.check(self._saving)
        if self._leads:
            with self._noting_half():
                way.begin(newest)
        begun = way.wait(self._run.environment.round_deadline_ms / 1000)
        if self._leads:
            self._marks.last = way.clear(self._saving)
        if way.comes_late:
            self._left.forget(self._run.trainer_rank)
            self._saves.absent.uncounted = None
        manifest, own = way.own_state(begun)
        started = Started()
        if manifest is not None:
            folder = self.directory.folder(manifest.name)
            started = self._go_on(folder, Choice(), way.comes_late)
        if not way.comes_late:
            return started
        told = way.told(started.name, started.step, own)
        logger.warning("%s.", told)
        return Started(started.step, started.name, (*started.report, told))

    def _open_store(self) -> None:
        """Sees that every trainer can: the first that has not left copies. Collective.

        Raises:
            ConfigurationError, SnapshotError: one cannot; on all.
        """
        if self._url is None:
            return
        failed: Error | None = None
        try:
            self._store = Store(self._url)
            self._saves.copy_to(self._store)
        except Error as error:
            failed = error
        told = "" if failed is None else f"trainer {self._run.trainer_rank}: {failed}"
        told = self._meeting.first_problem(told)
        if failed is not None:
            raise failed
        if told:
            raise ConfigurationError(f"resume({self._url!r}): {told}")

    def load(
        self, source: str | os.PathLike[str], choice: Choice, counted: Mapping[str, int]
    ) -> Started:
        """See ``DistributedOptimizer.load_snapshot``. Collective."""
        where = located(source, self.directory)
        with contextlib.suppress(SnapshotError):
            # What is being written needs the rows that go now.
            self.finish(self._run.environment.round_deadline_ms / 1000)
        self._subject.driver.settle()
        self._marks.give_up_again("the run goes back")
        if not self._saving.ready():
            self._saving.make_ready()
        # Which trainers spell in their own ways, so that none goes by its own.
        named = isinstance(source, str) and os.sep not in source
        self._loading = True
        try:
            with self._noting_half():
                started = self._go_back(where, choice, named)
        finally:
            self._loading = False
        if choice.only is not None:
            started = replace(started, step=counted["steps"])
        return started

    @contextlib.contextmanager
    def _noting_half(self) -> Iterator[None]:
        """Nothing is trained or saved where values are of two moments."""
        try:
            yield
        except SnapshotError as error:
            if error.partly_loaded:
                self._half = str(error)
            raise
        self._half = ""

    @contextlib.contextmanager
    def _changed_already(self) -> Iterator[None]:
        """What fails now leaves values that were loaded, and others' may differ."""
        try:
            yield
        except Exception as error:
            if isinstance(error, SnapshotError):
                error.partly_loaded = True
            self._half = f"a snapshot was loaded in part only: {describe(error)}"
            raise

    def _require_whole(self) -> None:
        if self._half:
            raise SnapshotError(self._half)

    def _load_newest(self, needed: bool = False, skip: bool = False) -> dict[str, Any]:
        return self._loader().load_newest(needed, skip)

    def _go_back(self, where: Path | str, choice: Choice, named: bool) -> Started:
        self._run.barrier()  # nobody trains on
        if isinstance(where, Path) and not named:
            self._meeting.find(where)
        with Stage(self.directory) as stage:  # used on trainer 0 alone
            found = self._meeting.decided(
                lambda: self._loader().load_named(where, choice, stage)
            )
            # As this trainer calls it: hosts may have the directory in other places.
            folder = where
            if isinstance(folder, str):
                folder = self.directory.path.joinpath(*found["inside"])
            with self._changed_already():
                started = self._go_on(folder, choice)
            if isinstance(where, str):
                self._run.barrier()  # all have read what goes now
        return started

    def _loader(self) -> Loader:
        return Loader(
            self._subject, self._saving, self.directory, self._store, self._way
        )

    def _go_on(self, folder: Path, choice: Choice, late: bool = False) -> Started:
        """Takes over what was loaded. Collective, but where trainers go.

        Args:
            folder: of the snapshot.
            choice: what of it.
            late: values have gone on: only this trainer's own state is taken.
        """
        name, files = folder.name, self.directory.files
        manifest = Directory(folder.parent, files).manifest(name)
        plan = choice.plan(manifest, self._saving.targets())
        self._saving.take_in(plan)
        trainers = {one.rank: one for one in manifest.trainers}
        rank = self._run.trainer_rank
        own = rank in trainers
        first = trainers[min(trainers)]
        trainer = trainers.get(rank, first)
        tree = read_tree(folder, trainer, files)
        self._saving.states_of_all(
            lambda: [
                read_tree(folder, one, files)["driver"] for one in manifest.trainers
            ]
        )
        missing = self._saving.restore_own_state(tree["driver"], own, plan)
        buffers = choice.kept(tree["own"]["buffers"])
        if not plan.whole:
            missing += self._own.restore_some_buffers(buffers)
        else:
            tree["own"]["buffers"] = buffers
            self._subject.counters.set_counters(tree["counters"])
            equal = len(trainers) == self._run.trainer_count
            missing += self._own.restore(tree["own"], own, equal)
            self._captured.clear()
            self._marks.went_back(manifest.number)
            ranks = range(self._run.trainer_count)
            steps = sum(trainers.get(r, first).steps for r in ranks)
            if not late:
                self._saves.absent.uncounted = manifest.version.steps - steps
        self._saves.tip = None
        warns = self._leads and not late
        told = [*(plan.warnings() if warns else ()), *missing]
        if told:
            logger.warning("snapshot %s: %s.", name, "; ".join(told))
        if late:
            return Started(trainer.steps, name, tuple(missing))
        return Started(
            trainer.steps,
            name,
            (*plan.lines(), *missing),
            {one.name: one.source for one in plan.taken.values()},
            dict(plan.missing),
            plan.unused,
        )

    # -- servers that come back --------------------------------------------------------

    def outlives(self) -> str:
        """Why there is nothing to go on from; empty if there may be."""
        return "" if self._way is not None else "trainers do not come and go here."

    def let_go(self) -> None:
        """Gives up what is being saved: its servers are lost. Idempotent."""
        self._captured.clear()
        self._saves.close(0.0)

    def meet_again(self, limit_s: float) -> None:
        """Other servers are there, of another run; a disk may refuse for so long."""
        number = self._subject.number
        self._way = UnderWay(self._run, self.directory, number, limit_s)

    def _met(self) -> UnderWay:
        if self._way is None:
            raise InternalError("trainers that step together do not outlive servers")
        return self._way

    def await_values(self, limit_s: float) -> None:
        """Waits until trainer 0 has loaded values into them; on the others.

        Raises:
            SnapshotError, OperationTimeoutError: it could not, or has not in time.
        """
        self._met().wait(limit_s, after_loss=True)

    def go_on_again(self) -> tuple[str, int, float]:
        """Goes on with values of the newest snapshot; its own state stays.

        Returns:
            The snapshot's name, this trainer's step then, and when that was.

        Raises:
            SnapshotError: there is none.
        """
        way, self._marks.last = self._met(), 0
        self.begin_anew()
        self._way = way  # which has the patience
        way.check(self._saving)
        if self._leads:
            with self._noting_half():
                way.begin(lambda: self._load_newest(needed=True))
        begun = way.wait(_TOLD_S)
        if begun.name is None:
            raise nothing_to_load(self.directory)
        manifest = self.directory.manifest(begun.name)
        self._saving.take_in(Choice().plan(manifest, self._saving.targets()))
        self._half = ""
        self._marks.last = max(manifest.number, self._marks.last)
        steps = {one.rank: one.steps for one in manifest.trainers}
        step = steps.get(self._run.trainer_rank, self._began[0])
        return begun.name, step, self._moments.get(manifest.number, self._began[1])

    def begin_anew(self) -> None:
        """Its servers are there again: what was being saved is given up."""
        before = self._saves
        self._begin()
        self._saves.go_on_from(before, self._store)
        self._left.forget(self._run.trainer_rank)
        newest = self._met().clear(self._saving) if self._leads else 0
        self._marks.last = max(self._marks.last, newest)

    # -- saving ------------------------------------------------------------------------

    def before_step(self, counted: Mapping[str, int]) -> None:
        """The next step begins.

        Raises:
            SnapshotError: several snapshots in a row could not be saved.
        """
        self._require_whole()
        self._saves.check()
        self._marks.before_step(counted)

    def after_step(self, counted: Mapping[str, int]) -> None:
        """A step is over: takes part in a snapshot if it is time."""
        self._marks.after_step(counted)

    def leaving(self, counted: Mapping[str, int]) -> None:
        """This trainer is about to leave: the others save while it has."""
        if self._loading or not self._saving.goes_on_alone:
            return
        if self._run.trainer_count == 1:
            return
        rank = self._run.trainer_rank
        try:
            packed = trees.pack(self._marks.tree(counted), f"state of trainer {rank}")
            self._left.write(rank, packed, counted["steps"])
        except Exception as error:  # the others wait for this trainer to leave
            logger.warning(
                "trainer %d leaves, and until it is back there are no snapshots: %s",
                rank,
                describe(error),
            )

    def take_answers(self) -> None:
        """Goes on with those whose mark was answered meanwhile."""
        self._captured.take_answers()

    def save(self, name: str | None, counted: Mapping[str, int]) -> str:
        """See ``DistributedOptimizer.save_snapshot``."""
        run, saving, marks = self._run, self._saving, self._marks
        self._require_whole()
        if not saving.in_step and not self._leads:
            raise InvalidArgumentError(
                "save_snapshot: trainers of this strategy are at different steps, and "
                "trainer 0 says when. Call it on trainer 0 (if "
                "cpudist.trainer_rank() == 0); under HalfAsync on all trainers of "
                "trainer 0's group, after the same step."
            )
        if name is not None:
            check_new_name(name, self.directory, self._store, self._url)
        limit_s = run.environment.round_deadline_ms / 1000
        if saving.at_barrier:
            self._come_to_barrier()
        # Also those of this step that others have still to mark: servers would refuse
        # one of the same moment.
        self.finish(limit_s, others_come=True)
        marks.give_up_again("another one was asked for")
        if not saving.ready():
            saving.make_ready()
        group = saving.in_step and not saving.together
        if group:
            number = marks.number_of_group(counted, limit_s)
        else:
            number = marks.next_number(counted)
        chosen = name or marks.name(number)
        skipped = self._saves.counts.skipped
        if self._leads:  # what a save that failed has left would be taken for ours
            # If it cannot be made, who writes will say so: the others mark already.
            with contextlib.suppress(SnapshotError):
                self.directory.prepare(chosen)
        # Of a group it is trainer 0's alone, and servers tell the others its name.
        told = "" if group and not self._leads else chosen
        marks.mark(number, told, counted, whole=True)
        marks.await_answers([number], limit_s)
        if self._saves.counts.skipped > skipped:
            raise SnapshotError(
                f"snapshot {chosen!r} was not taken; training goes on. Why: "
                f"{self._saves.why}"
            )
        try:
            self._saves.wait(chosen, limit_s, run.trainer_client().check)
        except SnapshotError as error:
            if self._captured.leader == run.trainer_rank and saving.in_step:
                self._meeting.tell(number, str(error))
            raise
        if self._captured.leader != run.trainer_rank:
            self._await_told(chosen, number, limit_s + _TOLD_S)
        elif saving.in_step:
            self._meeting.tell(number, None)
        return chosen

    def _come_to_barrier(self) -> None:
        """Makes this a moment at which everything of all trainers is on servers."""
        self._run.barrier()
        self._subject.driver.flush("all")

    def by_leader(self, what: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Has trainer 0 do something with a snapshot that was just saved.

        Collective where trainers are together, and among a group that is in step with
        trainer 0; else that alone calls it.

        Returns:
            What it returned there.

        Raises:
            SnapshotCorruptError, SnapshotError: as it did; on all.
        """
        if self._saving.together or self._saving.at_barrier:
            return self._meeting.decided(do, loads=False)
        if not self._saving.in_step:
            return do()
        limit_s = self._run.environment.round_deadline_ms / 1000
        check = self._run.trainer_client().check
        return self._meeting.handed(what, self._marks.round, do, limit_s, check)

    def _await_told(self, name: str, number: int, limit_s: float) -> None:
        """Waits until the leader tells that it is there, also in the store."""
        until = time.monotonic() + limit_s
        while not self._meeting.saved(number):
            self._run.trainer_client().check()
            if (why := self._meeting.failed(number)) is not None:
                raise SnapshotError(f"trainer {self._captured.leader}: {why}")
            if time.monotonic() > until:
                raise SnapshotError(
                    f"snapshot {name!r}: trainer {self._captured.leader} has not "
                    f"committed it within {limit_s:g} s; its log says why"
                )
            time.sleep(_POLL_S)

    # -- the end -----------------------------------------------------------------------

    def finish(self, timeout_s: float, others_come: bool = False) -> None:
        """Has everything written that was taken.

        Args:
            timeout_s: how long that may take.
            others_come: the others train on, and mark what this trainer has marked.

        Raises:
            SnapshotError: it takes longer.
        """
        self.settle()
        if (others_come or self._answers_come) and self._captured:
            # Others may wait for this trainer's part: all have marked it.
            self._marks.await_answers(
                [save.number for save in self._captured.all()], timeout_s
            )
        self._saves.drain(timeout_s, lambda: None)

    def settle(self) -> None:
        """No step comes for a while: what was captured is handed on."""
        self.take_answers()
        self._captured.settle()

    def close(self, timeout_s: float) -> None:
        """The end: what is being written gets so long. Idempotent."""
        until = time.monotonic() + timeout_s
        if timeout_s > 0:
            with contextlib.suppress(Error):
                self.finish(timeout_s)
            self._marks.give_up_again("the optimizer is closed")
        self._saves.close(max(0.0, until - time.monotonic()))

    @property
    def busy(self) -> bool:
        """Whether something that was taken is still being written.

        Also whether a mark is not answered that all trainers make at this step: they
        wait for each other's parts.
        """
        # First: what is answered meanwhile is being written before it is not awaited.
        waiting = self._captured.awaits_answer and self._answers_come
        return self._saves.busy or waiting

    @property
    def _answers_come(self) -> bool:
        """Whether marks are answered without another trainer's next step."""
        return self._saving.together or self._run.trainer_count == 1

    def seed_replicas(self) -> None:
        """Replicas were made: their generators go on where they were saved."""
        for missing in self._own.seed_replicas():
            logger.warning("%s.", missing)

    def stats(self) -> dict[str, Any]:
        """``snapshot`` of ``DistributedOptimizer.stats``."""
        self._saves.look_for_commits()
        return self.observed()

    def observed(self) -> dict[str, Any]:
        """As ``stats``, for any thread: as of when this trainer last looked."""
        return {
            **self._saves.counts.shown(),
            "pause_s_max": self._marks.pause_s_max,
            **self._saves.copied,
        }
