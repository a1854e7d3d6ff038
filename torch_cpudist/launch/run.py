# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: two classes, most of whose lines say what their callers rely on
"""``Run``: one rank's part of a run, as everything that trains sees it.

What lives and dies with it is in ``context``; what a run calls at its barriers and at
its end is a ``Participant``, so that neither knows an optimizer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from torch.utils import data

from torch_cpudist import ranges
from torch_cpudist.errors import (
    ClosedError,
    ConfigurationError,
    Error,
    ForkedProcessError,
    PeerLostError,
)
from torch_cpudist.launch.comeback import Comeback
from torch_cpudist.launch.endpoints import Endpoints
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout, Numbers
from torch_cpudist.launch.loops import Loops
from torch_cpudist.launch.step_counts import StepCounts
from torch_cpudist.settings.updates import Trainers

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from torch_cpudist import _core
    from torch_cpudist.launch.rendezvous import Rendezvous
    from torch_cpudist.strategies.base import Strategy


def forked() -> ForkedProcessError:
    """The error for a child that was forked from a process with a run."""
    if data.get_worker_info() is not None:
        who = (
            "A DataLoader worker cannot use torch_cpudist; do lookups, steps and calls "
            "of cpudist in the training process (split_files() before the DataLoader "
            "is made)."
        )
    else:
        who = (
            "Do lookups, steps and calls of cpudist there. A process of your own that "
            "is to use them starts by 'spawn' (multiprocessing.get_context('spawn')), "
            "and calls init() itself; one that is not to may be forked before init()."
        )
    return ForkedProcessError(
        "this process was forked after init(): its connections and threads belong to "
        f"the parent. {who}"
    )


class Closeable(Protocol):
    """What a run ends with itself."""

    def close(self) -> None:
        """Gives back what it holds; raises nothing."""


OwnedT = TypeVar("OwnedT", bound=Closeable)


class Participant(ABC):
    """What takes part in a run's barriers and in its end: an optimizer's part.

    Attributes:
        optimizer: whose part it is, as scripts have it.
        strategy: that it trains by.
    """

    optimizer: Any
    strategy: Strategy

    @abstractmethod
    def before_barrier(self) -> None:
        """Hands on what it must before everybody has left."""

    @abstractmethod
    def after_barrier(self) -> None:
        """Takes part again."""

    def observed(self) -> Mapping[str, Any]:
        """Its counters, for whoever shows them; by default none.

        Thread safety: any thread, while it trains; waits for nobody.
        """
        return {}

    def round_steps(self) -> dict[str, Any] | None:
        """What ``StepCounts`` compares; by default steps are no rounds."""
        return None

    def begin_counting(self) -> None:  # noqa: B027 - as above
        """Counts steps from here on."""

    @abstractmethod
    def leave(self) -> None:
        """Ends this trainer's part in rounds: the others go on without it."""

    @abstractmethod
    def take_home(self, pull: str) -> None:
        """Brings values home, as ``flush`` does, for the end of the run."""

    @abstractmethod
    def close(self, tell_servers: bool = True) -> None:
        """Ends it. Idempotent."""

    @abstractmethod
    def global_step(self) -> int:
        """The cluster's count of steps; see ``cpudist.global_step``."""

    def cannot_outlive(self, index: int, rejoins: bool) -> str:
        """Why it cannot go on with servers that are there again; empty if it can.

        Args:
            index: which of the run's participants it is.
            rejoins: with the same ones, which have counted this trainer as lost.
        """
        del index, rejoins
        return "what takes part in this run ends with its servers."

    def cannot_leave(self) -> str:
        """Why the others cannot go on when it leaves in mid-training; empty if so."""
        return "what takes part in this run ends with it"

    def saves(self) -> bool:
        """Whether it has snapshots saved; by default not."""
        return False

    def save_last(self) -> None:  # noqa: B027 - as above
        """Has a snapshot saved, if it may say when: it is about to leave."""

    def let_go(self) -> None:  # noqa: B027 - as above
        """Ends what it has under way with servers that are lost. Idempotent."""

    def learn_losses(self, client: _core.Client) -> None:  # noqa: B027
        """Asks servers what they have carried out; see ``comeback``. Idempotent."""

    def go_on_with(  # noqa: B027
        self, client: _core.Client, limit_s: float | None
    ) -> None:
        """Goes on with servers that are there again; see ``comeback``."""

    @abstractmethod
    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """What it trains."""


@dataclass(eq=False, repr=False)
class Run:
    """One rank: its role and numbers, its server and client, and who takes part.

    Thread safety: ``barrier`` from one thread at a time, else from any.

    Attributes:
        environment: settings of this rank.
        layout: roles of all ranks of this torchrun job.
        numbers: what this rank is.
        endpoints: its server and client; empty after the end.
        process_group: torch's default group over the trainers, if this process has one.
        backend: of the groups that collective strategies make.
        closed: ``shutdown()`` was called.
        forked: this is a forked child, which may use nothing of it.
        loops: over datasets, on this rank.
    """

    environment: Environment
    layout: Layout
    numbers: Numbers
    endpoints: Endpoints
    process_group: dist.ProcessGroup | None
    backend: str
    closed: bool = field(default=False, init=False)
    forked: bool = field(default=False, init=False)
    loops: Loops = field(default_factory=Loops, init=False)
    _participants: list[Participant] = field(default_factory=list, init=False)
    _openings: int = field(default=0, init=False)
    _counted: StepCounts | None = field(default=None, init=False)
    _owned: dict[str, Closeable] = field(default_factory=dict, init=False)
    _owned_lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        """Its servers may be lost, and others come."""
        self._comeback = Comeback(
            self.environment,
            self.numbers,
            lambda: self.endpoints,
            self.participants,
            lambda: self.closed,
        )

    # -- who this is -------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number among all."""
        return self.environment.rank

    @property
    def role(self) -> str:
        """``"trainer"``, or ``"server"`` on a dedicated server."""
        return self.numbers.role

    @property
    def trainer_rank(self) -> int:
        """Its number among trainers; -1 on a dedicated server."""
        return self.numbers.trainer_rank

    @property
    def trainer_count(self) -> int:
        """Trainers of the run."""
        return self.numbers.trainer_count

    @property
    def server_count(self) -> int:
        """Servers of the run."""
        return self.numbers.server_count

    @property
    def shard_id(self) -> int:
        """Which server this rank is; -1 if it is none."""
        return self.numbers.shard_id

    @property
    def run_id(self) -> int:
        """The run's, equal on all ranks."""
        return self.endpoints.run_id

    @property
    def incarnation(self) -> int:
        """How often this trainer was started; 1 but for one that has come back."""
        return self.endpoints.incarnation

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Where the ranks of this torchrun job met; ``None`` after the end."""
        return self.endpoints.rendezvous

    def trainers(self) -> Trainers:
        """The trainers of the run."""
        if not self.layout.servers:
            return Trainers(self.trainer_count, None)
        hosts = tuple(self.layout.hosts[rank] for rank in self.layout.trainers)
        return Trainers(self.trainer_count, hosts)

    # -- its ends ----------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises if this run was shut down here or belongs to the parent process."""
        if self.forked:
            raise forked()
        if self.closed:
            raise ClosedError("shutdown() was called; call init() to start again.")

    @property
    def client(self) -> _core.Client | None:
        """The trainer's end of the servers; ``None`` on a dedicated server."""
        self.check_usable()
        return self.endpoints.client

    @property
    def server(self) -> _core.Server | None:
        """This rank's server; ``None`` on a trainer without one."""
        self.check_usable()
        return self.endpoints.server

    def addresses(self) -> list[str]:
        """Where this rank's server listens; empty without one or in a world of one."""
        self.check_usable()
        return list(self.endpoints.listening)

    def trainer_client(self) -> _core.Client:
        """The client.

        Raises:
            ConfigurationError: this rank is a dedicated server.
            ClosedError, ForkedProcessError: the run cannot be used any more.
            Error: its servers were lost, and it could not go on with others.
        """
        client = self.client
        self._comeback.check()
        if client is None:
            raise ConfigurationError(
                f"rank {self.rank} is a dedicated server and does not train. Branch in "
                "the script: if cpudist.is_server(): cpudist.serve()"
            )
        return client

    def check_lost(self) -> None:
        """Raises if it is known here that this run cannot go on; waits for nothing.

        For waits that are not of the core: its own end with this by themselves.

        Raises:
            PeerLostError: names the rank that was lost.
            Error: what else this rank's client has failed with.
        """
        ends = self.endpoints
        if ends.server is not None and ends.server.stats()["lost"]:
            ends.server.wait_done(0.0)  # says whom
        if ends.client is not None:
            ends.client.check()

    def leave_if_asked(self) -> None:
        """Leaves, and ends this process, if SIGTERM has come; between two steps.

        Raises:
            PreemptedError: it has left.
        """

    # -- who takes part ----------------------------------------------------------------

    def participants(self) -> Sequence[Participant]:
        """Those that take part, oldest first."""
        return tuple(self._participants)

    def add_participant(self, participant: Participant) -> None:
        """Notes one that ``shutdown()`` is to close."""
        self._participants.append(participant)

    def remove_participant(self, participant: Participant) -> None:
        """Forgets a closed one. Idempotent."""
        self._participants = [p for p in self._participants if p is not participant]

    def next_opening(self) -> str:
        """A name for the optimizer that trainers begin to build, all in one order."""
        self._openings += 1
        return f"{self.run_id}/{self._openings}"

    def global_step(self) -> int:
        """The cluster's count of steps, of the newest optimizer."""
        self.check_usable()
        return self._participants[-1].global_step() if self._participants else 0

    def outlive(self, error: Error, client: _core.Client | None) -> None:
        """Returns when servers have come back, and all that takes part goes on.

        Args:
            error: what a call has failed with.
            client: whose call it was; ``None``: of one that was replaced since.

        Raises:
            Error: ``error``, where nothing is to be waited for (as without
                ``CPUDIST_REJOIN_S``); else why it cannot go on.
        """
        self._comeback.outlive(error, client)

    def outlived_s(self) -> float:
        """Seconds that ``outlive`` has waited, and calls of clients it has replaced."""
        return self._comeback.waited_s

    def steady(self) -> AbstractContextManager[object]:
        """While it is entered no other thread goes on with servers that come back."""
        return self._comeback.lock

    def barrier(self) -> None:
        """Waits for all trainers that have not shut down; see ``cpudist.barrier``."""
        while True:
            self.leave_if_asked()
            client = self.trainer_client()
            try:
                self._barrier(client)
                break
            except PeerLostError as error:
                self.outlive(error, client)
        self.leave_if_asked()

    def _barrier(self, client: _core.Client) -> None:
        participants = self.participants()
        for participant in participants:
            participant.before_barrier()
        self._step_counts.before(participants)
        with ranges.of(ranges.WAIT):
            client.barrier()
        self._step_counts.after(participants)
        for participant in participants:
            participant.after_barrier()

    @property
    def _step_counts(self) -> StepCounts:
        if self._counted is None:
            shared = self.environment.apart is None
            self._counted = StepCounts(
                self.rendezvous if shared else None,
                self.trainer_rank,
                self.trainer_count,
            )
        return self._counted

    # -- what ends with it -------------------------------------------------------------

    def owned(self, key: str, make: Callable[[], OwnedT]) -> OwnedT:
        """What the run holds under ``key``; made at first, closed at the end.

        Args:
            key: names one thing, always of one type.
            make: called once, under a lock; it must not ask for another.

        Raises:
            ClosedError, ForkedProcessError: the run cannot be used any more.
        """
        self.check_usable()
        with self._owned_lock:
            if key not in self._owned:
                self._owned[key] = make()
            return cast(OwnedT, self._owned[key])

    def close_owned(self) -> None:
        """Closes what ``owned`` has made. Idempotent."""
        with self._owned_lock:
            owned, self._owned = self._owned, {}
        for one in reversed(owned.values()):
            one.close()
