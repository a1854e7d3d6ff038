# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``Context``: everything one rank holds between ``init()`` and ``shutdown()``.

There is no process-wide singleton: each thread has its own current context, so that
tests run several ranks as threads. The only thing a process shares is the list of open
contexts, which a fork and the end of the process must know.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from torch_cpudist.errors import (
    ClosedError,
    ConfigurationError,
    ForkedProcessError,
    NotInitializedError,
    OperationTimeoutError,
    describe,
)
from torch_cpudist.launch.default_group import TrainerGroup
from torch_cpudist.launch.endpoints import Endpoints
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout, Numbers, Trainers
from torch_cpudist.launch.torch_threads import TorchThreads
from torch_cpudist.log import logger
from torch_cpudist.machine.host import close_inherited_sockets
from torch_cpudist.settings import fields as config

if TYPE_CHECKING:
    import torch.distributed as dist

    from torch_cpudist import _core
    from torch_cpudist.collective.shared_group import TrainersGroup
    from torch_cpudist.launch.rendezvous import Rendezvous
    from torch_cpudist.optimizer.distributed import DistributedOptimizer

_FORKED = (
    "this process was forked after init(): its connections and threads belong to the "
    "parent. A DataLoader worker cannot use torch_cpudist; do lookups, steps and calls "
    "of cpudist in the training process (split_files() before the DataLoader is made)."
)


class Context:
    """One rank: its role and numbers, its server and client, and what is open on them.

    Thread safety: ``barrier``, ``shutdown`` from one thread at a time, else from any.

    Attributes:
        environment: settings of this rank.
        layout: roles of all ranks of this torchrun job.
        role: ``"trainer"``, or ``"server"`` on a dedicated server.
        rank: among all ranks.
        trainer_rank: among trainers; -1 on a dedicated server.
        trainer_count: trainers of the run.
        server_count: servers of the run.
        shard_id: which server this rank is; -1 if it is none.
        process_group: torch's default group over the trainers, if this process has one.
        backend: of the groups that collective strategies make.
    """

    def __init__(
        self,
        environment: Environment,
        layout: Layout,
        endpoints: Endpoints,
        group: TrainerGroup,
        process_group: dist.ProcessGroup | None,
        threads: TorchThreads,
        numbers: Numbers,
    ) -> None:
        """Made by ``init()``."""
        self.environment = environment
        self.layout = layout
        self.rank = environment.rank
        self.role = numbers.role
        self.trainer_rank = numbers.trainer_rank
        self.trainer_count = numbers.trainer_count
        self.server_count = numbers.server_count
        self.shard_id = numbers.shard_id
        self.process_group = process_group
        self.backend = group.backend
        self._endpoints = endpoints
        self._group = group
        self._threads = threads
        self._optimizers: list[DistributedOptimizer] = []
        self._openings = 0
        self._previous = threading.local()
        self._forked = False
        self._closed = False
        _open_contexts.add(self)

    # -- state -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``shutdown()`` was called."""
        return self._closed

    def check_usable(self) -> None:
        """Raises if this context was shut down or belongs to the parent process."""
        if self._forked:
            raise ForkedProcessError(_FORKED)
        if self._closed:
            raise ClosedError("shutdown() was called; call init() to start again.")

    @property
    def client(self) -> _core.Client | None:
        """The trainer's end of the servers; ``None`` on a dedicated server."""
        self.check_usable()
        return self._endpoints.client

    @property
    def server(self) -> _core.Server | None:
        """This rank's server; ``None`` on a trainer without one."""
        self.check_usable()
        return self._endpoints.server

    def addresses(self) -> list[str]:
        """Where this rank's server listens; empty without one or in a world of one."""
        self.check_usable()
        return list(self._endpoints.listening)

    def trainer_client(self) -> _core.Client:
        """The client.

        Raises:
            ConfigurationError: this rank is a dedicated server.
            ClosedError, ForkedProcessError: the context cannot be used any more.
        """
        client = self.client
        if client is None:
            raise ConfigurationError(
                f"rank {self.rank} is a dedicated server and does not train. Branch in "
                "the script: if cpudist.is_server(): cpudist.serve()"
            )
        return client

    def trainers(self) -> Trainers:
        """The trainers of the run."""
        if not self.layout.servers:
            return Trainers(self.trainer_count, None)
        hosts = tuple(self.layout.hosts[rank] for rank in self.layout.trainers)
        return Trainers(self.trainer_count, hosts)

    @property
    def cores(self) -> int:
        """This rank's share of its host's cores."""
        return self._threads.cores

    def add_optimizer(self, optimizer: DistributedOptimizer) -> None:
        """Notes an optimizer that ``shutdown()`` is to close."""
        self._optimizers.append(optimizer)

    def remove_optimizer(self, optimizer: DistributedOptimizer) -> None:
        """Forgets a closed optimizer. Idempotent."""
        self._optimizers = [o for o in self._optimizers if o is not optimizer]

    def next_opening(self) -> str:
        """A name for the optimizer that trainers begin to build, all in one order."""
        self._openings += 1
        return f"{self._endpoints.run_id}/{self._openings}"

    def optimizers(self) -> list[DistributedOptimizer]:
        """The open optimizers, oldest first."""
        return list(self._optimizers)

    def global_step(self) -> int:
        """The cluster's count of steps, of the newest optimizer."""
        self.check_usable()
        return self._optimizers[-1].global_step() if self._optimizers else 0

    @property
    def run_id(self) -> int:
        """The run's, equal on all ranks."""
        return self._endpoints.run_id

    @property
    def rendezvous(self) -> Rendezvous | None:
        """Where the ranks of this torchrun job met; ``None`` after the end."""
        return self._endpoints.rendezvous

    def trainers_group(self) -> TrainersGroup:
        """Collectives of trainers beside those of optimizers; ``metrics`` uses them."""
        self.check_usable()
        return self._group.shared

    # -- the current context of a thread -----------------------------------------------

    def __enter__(self) -> Context:
        """Makes this the current context of the calling thread."""
        stack = self._previous.__dict__.setdefault("stack", [])
        stack.append(getattr(_local, "context", None))
        _local.context = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Gives the thread its earlier context back; shuts nothing down."""
        _local.context = self._previous.stack.pop()

    # -- waiting for others ------------------------------------------------------------

    def barrier(self) -> None:
        """Waits for all trainers that have not shut down; see ``cpudist.barrier``."""
        client = self.trainer_client()
        for optimizer in self.optimizers():
            optimizer.before_barrier()
        client.barrier()
        for optimizer in self.optimizers():
            optimizer.after_barrier()

    def serve(self) -> None:
        """Serves until every trainer has said goodbye; see ``cpudist.serve``."""
        server = self.server
        if self.role != "server" or server is None:
            raise ConfigurationError(
                f"serve() on rank {self.rank}, which is trainer {self.trainer_rank}: "
                "only dedicated servers call it (if cpudist.is_server(): "
                "cpudist.serve()); a colocated rank serves by itself."
            )
        self._serve_on(server)
        if lost := server.stats()["lost"]:
            logger.warning(
                "%d trainers were lost and did not come back within CPUDIST_REJOIN_S; "
                "the others have said goodbye.",
                lost,
            )

    def _serve_on(self, server: _core.Server) -> None:
        """Waits for all goodbyes, as long as somebody makes progress."""
        limit_s = self.environment.round_deadline_ms / 1000
        progress: tuple[int, ...] = ()
        since = time.monotonic()
        while not server.wait_done(1.0):
            stats = server.stats()
            current = (stats["pushes"], stats["rounds"], stats["trainers"])
            if current != progress:
                progress, since = current, time.monotonic()
            elif time.monotonic() - since > limit_s:
                raise OperationTimeoutError(
                    f"server {self.shard_id}: trainers live, but none has pushed or "
                    f"said goodbye for {limit_s:g} s. Does every trainer call "
                    "cpudist.shutdown()? A longer pause needs a larger "
                    "CPUDIST_ROUND_DEADLINE_MS."
                )

    # -- the end -----------------------------------------------------------------------

    def shutdown(self, pull: str = "all") -> None:
        """Leaves the run in good order; see ``cpudist.shutdown``."""
        if self._forked:
            raise ForkedProcessError(_FORKED)
        if self._closed:
            return
        config.check_pull("shutdown", pull)
        failure = sys.exc_info()[1]
        if failure is not None and self.trainer_count > 1:
            # Leaving here would let the others go on without this trainer's data.
            logger.error(
                "shutdown() while %s is raised: this rank counts as lost, not as done.",
                describe(failure),
            )
            self._release(describe(failure))
            return
        reason = "shutdown()"
        try:
            for optimizer in self.optimizers():
                optimizer.leave()
                optimizer.take_home(pull)
                optimizer.close()
            if self._endpoints.client is not None:
                self._endpoints.client.goodbye()
            if self._endpoints.server is not None:
                self._serve_on(self._endpoints.server)
        except BaseException as error:
            reason = describe(error)
            raise
        finally:
            self._release(reason)

    def abort(self, reason: str) -> None:
        """Drops everything at once, without goodbye: peers see this rank as lost."""
        if not self._closed and not self._forked:
            self._release(reason)

    def _release(self, reason: str) -> None:
        self._closed = True
        _open_contexts.discard(self)
        for optimizer in self.optimizers():
            optimizer.close(tell_servers=False)
        self._endpoints.stop(reason)
        self._group.leave()
        self._threads.give_back()
        self.process_group = None
        self._endpoints = Endpoints()

    def _after_fork(self) -> None:
        """In a forked child: drops inherited sockets; the core refuses every use."""
        self._forked = True
        close_inherited_sockets(self._endpoints.sockets)


_local = threading.local()
_open_contexts: weakref.WeakSet[Context] = weakref.WeakSet()


def set_current(context: Context) -> None:
    """Makes ``context`` the calling thread's current one."""
    _local.context = context


def set_last(context: Context | None) -> None:
    """Makes what ``last()`` of another thread returned the calling thread's."""
    _local.context = context


def last() -> Context | None:
    """The calling thread's context, also one that was shut down."""
    return getattr(_local, "context", None)


def any_open() -> bool:
    """Whether a thread of this process has called ``init()`` and not ``shutdown()``."""
    return any(not context._forked for context in _open_contexts)


def get_context() -> Context:
    """Returns the calling thread's context, also after ``shutdown()``.

    Raises:
        NotInitializedError: ``init()`` was not called in this thread.
        ForkedProcessError: it was called in the parent of this process.
    """
    context = last()
    if context is None:
        raise NotInitializedError(
            "cpudist.init() was not called in this thread. Call it first; in another "
            "thread of a process that did, use: with context: (init() returns it)."
        )
    if context._forked:
        raise ForkedProcessError(_FORKED)
    return context


def current() -> Context:
    """Returns the calling thread's open context.

    Raises:
        NotInitializedError: ``init()`` was not called in this thread.
        ClosedError: it was shut down.
        ForkedProcessError: it belongs to the parent of this process.
    """
    context = get_context()
    context.check_usable()
    return context


def _after_fork_in_child() -> None:
    for context in list(_open_contexts):
        context._after_fork()


def _at_exit() -> None:
    """Ends what a script left open; an exit without goodbye counts as a loss."""
    for context in list(_open_contexts):
        if context._forked:
            continue
        if context.trainer_count > 1 and getattr(sys, "last_value", None) is None:
            logger.warning(
                "the process ends without cpudist.shutdown(): the other ranks will see "
                "%s %d as lost. Call cpudist.shutdown() at the end of the script.",
                context.role,
                context.rank,
            )
        fatal = getattr(sys, "last_value", None)
        context.abort(describe(fatal) if fatal else "it ended without shutdown()")


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
