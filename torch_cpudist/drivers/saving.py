# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a driver does for snapshots: the moment that one is of, and what it consists of.

A snapshot is of one moment of every trainer, between two of its steps, and of all
servers, which have what was pushed before it and nothing of what came after. How
trainers agree on that is the strategy's; so is who keeps what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_cpudist.errors import SnapshotError

if TYPE_CHECKING:
    from pathlib import Path

    from torch_cpudist.snapshot.choice import Plan, Target
    from torch_cpudist.snapshot.files import Files
    from torch_cpudist.snapshot.manifest import Dense, File, Table, Version
    from torch_cpudist.snapshot.reading import Snapshot
    from torch_cpudist.snapshot.staging import Stage


@dataclass(frozen=True)
class CutAnswer:
    """What came of the moment that a trainer has marked.

    Attributes:
        number: of the cut.
        taken: whether there is a snapshot of it.
        name: of the snapshot.
        reason: why not, if it was not taken.
        leader: the trainer that commits it.
        again: this trainer's mark was taken back, and it may mark this number again.
        torn: it was taken back too late for some servers, which nobody else can know.
        unmarked: this trainer has asked for it, servers have refused that, and nobody
            marks it.
    """

    number: int
    taken: bool
    name: str
    reason: str = ""
    leader: int = 0
    again: bool = False
    torn: bool = False
    unmarked: bool = False


@dataclass(frozen=True)
class Presence:
    """Trainers that some server has met, and waits for at its end.

    Attributes:
        present: that are there.
        lost: that may come back, as their servers have not given them up.
    """

    present: frozenset[int]
    lost: frozenset[int]


@dataclass(frozen=True)
class Written:
    """What a snapshot consists of, beside trainers' own files.

    Attributes:
        version: of the parameters.
        servers: that wrote files.
        members: trainers that took part.
        tables, dense: as they were.
        files: that were written and outlive a crash.
        base: number of the cut since which rows in them have changed; 0: all rows.
    """

    version: Version
    servers: int
    members: tuple[int, ...]
    tables: tuple[Table, ...]
    dense: tuple[Dense, ...]
    files: tuple[File, ...]
    base: int = 0


def no_snapshots(strategy: str) -> SnapshotError:
    """The refusal of a strategy that has none."""
    return SnapshotError(
        f"{strategy} has no snapshots: resume(), save_snapshot() and load_snapshot() "
        "are there for Sync, HalfAsync, Async, Geo, AllReduce, Reduce, LocalSGD and "
        "Hybrid of these. Nothing was changed. Train with one of them, or save "
        "model.state_dict() and opt.state_dict() after opt.flush()."
    )


class Saving(ABC):
    """Of one driver. Its methods are the training thread's but where they say else.

    Attributes:
        together: all trainers are at the same step whenever a step is over, so that
            each knows by itself when it is time, and marks without being asked.
        on_servers: servers write the files.
        asks_first: others wait for trainer 0 within its next step, so that it asks for
            marks before it gives its own.
        goes_on_alone: trainers train on while one has left.
        deltas: rows that have not changed since an earlier snapshot can be left out.
        takes_back: a mark that keeps this trainer waiting for others is taken back, so
            that nobody waits for another's evaluation; ``wanted`` returns it again.
        keeps_nobody: a mark keeps no trainer from training longer than others do
            anyway, so that it may wait for a long evaluation.
        at_barrier: what the script asks for is of the moment after a barrier, and all
            trainers call it; what is due by itself is of a moment that they come to.
        waits_at_once: a mark keeps this trainer waiting from the end of its step on;
            else pushes of some steps find room behind it.
        comes_and_goes: in jobs of their own trainers may end and come back at any time,
            so that ``resume`` waits for nobody but trainer 0, at the start.
    """

    together: bool
    on_servers: bool
    asks_first: bool = False
    goes_on_alone: bool = False
    deltas: bool = False
    takes_back: bool = False
    keeps_nobody: bool = False
    at_barrier: bool = False
    waits_at_once: bool = False
    comes_and_goes: bool = False

    def ready(self) -> bool:
        """Whether a snapshot can be of this moment; else of a later one."""
        return True

    @property
    def in_step(self) -> bool:
        """Whether this trainer is at trainer 0's step whenever a step is over."""
        return self.together

    def when_between(self, do: Callable[[], None]) -> None:  # noqa: B027
        """Has ``do`` mark what is wanted at moments that no step is the end of.

        By default there are none.
        """

    def make_ready(self) -> None:  # noqa: B027 - most always are
        """Makes this a moment that a snapshot can be of. Collective."""

    @abstractmethod
    def count(self, steps: int, rounds: int) -> int:
        """What ``every_steps`` counts, equal on all trainers that are ``together``.

        Args:
            steps: of this trainer.
            rounds: what ``Driver.step`` has returned last.
        """

    def knows(self, number: int) -> bool:
        """Whether what has changed since a cut is known, by all who write. Any thread.

        Raises:
            PeerLostError, OperationTimeoutError: a server does not answer.
        """
        return False

    @abstractmethod
    def mark(
        self, number: int, name: str, wait_ms: int, base: int = 0, hold_ms: int = 0
    ) -> CutAnswer | None:
        """Marks this moment.

        Args:
            number: of the cut; more than any before.
            name: of the snapshot, from who begins one; else empty.
            wait_ms: how long the others may take, after the first.
            base: from trainer 0: of rows, only those that have changed since this cut
                are wanted; 0: all. Where ``deltas`` is false it is 0.
            hold_ms: how long this trainer may be kept from its next steps by others
                that have not marked; 0: for ``wait_ms``. Where ``takes_back`` is false
                it is 0.

        Returns:
            The answer; ``None`` where it comes later, from ``answer``.

        Raises:
            PeerLostError, OperationTimeoutError: a server does not answer.
        """

    def ask(self, number: int, name: str, wait_ms: int) -> str:
        """Has ``wanted`` return this cut, on all trainers, this one too.

        Args:
            number: of the cut.
            name: of the snapshot.
            wait_ms: how long all marks may take.

        Returns:
            Why there will be none, else nothing.

        Raises:
            PeerLostError, OperationTimeoutError: a server does not answer.
        """
        return f"cut {number}: nobody asks for marks here, each is given at once"

    def answer(self) -> CutAnswer | None:
        """The answer to a mark that has come since; only once. Any thread.

        Does not wait. ``begin`` comes from the thread that took it.

        Raises:
            PeerLostError, OperationTimeoutError: pushes of this trainer have failed.
        """
        return None

    def wanted(self) -> int:
        """The number of a cut that another trainer has begun, else 0."""
        return 0

    def begin(self, number: int, folder: Path, files: Files) -> None:  # noqa: B027
        """Prepares, on its leader, to write what it has itself of a cut.

        Args:
            number: of the cut, just taken.
            folder: of the snapshot.
            files: the file system.
        """

    def members(self, number: int) -> tuple[int, ...] | None:
        """Trainers that have marked a cut that was taken. Any thread, of its leader.

        Returns:
            ``None`` where all have.

        Raises:
            SnapshotError: servers do not know the cut any more.
            PeerLostError, OperationTimeoutError: a server does not answer.
        """
        return None

    def presence(self) -> Presence:
        """Trainers that servers wait for. Any thread; where ``comes_and_goes``.

        Raises:
            PeerLostError, OperationTimeoutError: a server does not answer.
        """
        return Presence(frozenset(), frozenset())

    @abstractmethod
    def poll(self, number: int) -> Written | None:
        """How far it is; ``None`` while it is being written. Any thread, of its leader.

        Raises:
            SnapshotError: it failed, and says where and why.
            PeerLostError, OperationTimeoutError: a server does not answer.
        """

    @abstractmethod
    def abandon(self, number: int) -> None:
        """Drops a cut that cannot become a snapshot. Any thread."""

    def own_state(self) -> dict[str, Any]:
        """What this trainer has itself of the parameters and their optimizer."""
        return {}

    def restore_own_state(
        self, tree: Mapping[str, Any], own: bool, plan: Plan
    ) -> list[str]:
        """Puts back what ``own_state`` has returned. Collective.

        Args:
            tree: that.
            own: of this trainer; else of trainer 0.
            plan: what is taken; where the run does not go back as a whole, only what
                belongs to the parameters that are.

        Returns:
            What could not be put back.
        """
        return []

    def states_of_all(  # noqa: B027 - most need no others'
        self, read: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Says, before ``restore_own_state``, how to have what all have returned.

        Args:
            read: reads it, of all trainers that have saved.
        """

    def use(self, path: Path) -> None:  # noqa: B027 - most write it themselves
        """Tells the server of this process, if it has one, where snapshots are."""

    def sees(self, token: str) -> list[str]:
        """Which servers do not see a file in their directory of snapshots, and why."""
        return []

    @abstractmethod
    def targets(self) -> list[Target]:
        """Tables and dense parameters that can be loaded."""

    @abstractmethod
    def load(self, snapshot: Snapshot, plan: Plan, stage: Stage) -> None:
        """Loads parameters, on trainer 0, while the others wait at a barrier.

        Args:
            snapshot: to load.
            plan: what of it goes where, by ``targets``; may be of others, too.
            stage: in the directory of snapshots that servers see.

        Raises:
            SnapshotCorruptError: a file is damaged; what of it was loaded is there.
            SnapshotError: a file cannot be read or written; the same.
        """

    @abstractmethod
    def take_in(self, plan: Plan) -> None:
        """Takes over, on every trainer and after a barrier, what was loaded."""
