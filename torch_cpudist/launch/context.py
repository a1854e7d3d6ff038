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
from typing import TYPE_CHECKING, Any

from torch_cpudist.errors import (
    ConfigurationError,
    NotInitializedError,
    OperationTimeoutError,
    PreemptedError,
    describe,
)
from torch_cpudist.launch.default_group import DefaultGroup
from torch_cpudist.launch.endpoints import Endpoints
from torch_cpudist.launch.environment import (
    Alone,
    Environment,
    launched_count,
    parse_alone,
)
from torch_cpudist.launch.layout import Layout, Numbers
from torch_cpudist.launch.loads import ServerLoad
from torch_cpudist.launch.preemption import Preemption
from torch_cpudist.launch.rooms import ServerRoom
from torch_cpudist.launch.run import Run, forked
from torch_cpudist.launch.torch_threads import TorchThreads
from torch_cpudist.log import logger
from torch_cpudist.machine import topology
from torch_cpudist.machine.host import close_inherited_sockets
from torch_cpudist.settings.fields import check_pull

if TYPE_CHECKING:
    import torch.distributed as dist

    from torch_cpudist import _core


# How often a server looks whether the trainers that are to come still live.
_START_LOOK_S = 0.1
# Raised where something is over, not where it has failed.
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)


class Context(Run):
    """A run from ``init()`` to ``shutdown()``: its life, and whose current one it is.

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
        closed: ``shutdown()`` was called.
    """

    def __init__(
        self,
        environment: Environment,
        layout: Layout,
        endpoints: Endpoints,
        group: DefaultGroup,
        process_group: dist.ProcessGroup | None,
        threads: TorchThreads,
        numbers: Numbers,
    ) -> None:
        """Made by ``init()``."""
        super().__init__(
            environment, layout, numbers, endpoints, process_group, group.backend
        )
        self._group = group
        self._threads = threads
        self._previous = threading.local()
        open_contexts.add(self)
        self._preemption = Preemption(self)

    @property
    def cores(self) -> int:
        """This rank's share of its host's cores."""
        return self._threads.cores

    def optimizers(self) -> list[Any]:
        """The open optimizers, oldest first."""
        return [part.optimizer for part in self.participants()]

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

    # -- serving -----------------------------------------------------------------------

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
        dedicated = self.role == "server" and self.environment.world_size > 1
        store = self.rendezvous if dedicated else None
        room, load = ServerRoom(store, self.rank), ServerLoad(store, self.rank)
        progress: tuple[int, ...] = ()
        since = time.monotonic()
        room.tell()
        load.tell()
        starting = dedicated and self.environment.apart is None
        while not server.wait_done(_START_LOOK_S if starting else 1.0):
            stats = server.stats()
            starting = starting and self._starting(stats["trainers"])
            room.tell()
            if not starting:  # it is told over seconds
                load.tell()
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

    def _starting(self, came: int) -> bool:
        """Whether trainers are still to come.

        Raises:
            PeerLostError: one of the ranks has ended before they have.
        """
        rendezvous = self.rendezvous
        if rendezvous is None:
            return False
        if came >= self.trainer_count:
            rendezvous.roll.end()
            return False
        lost = rendezvous.lost()
        if lost is not None:
            raise lost
        return True

    # -- the end -----------------------------------------------------------------------

    def shutdown(self, pull: str = "all", *, failed: bool | None = None) -> None:
        """Leaves the run in good order; see ``cpudist.shutdown``."""
        if self.forked:
            raise forked()
        if self.closed:
            return
        check_pull("shutdown", pull)
        failure = _failure()
        if failed is None:
            failed = failure is not None
        if failed and self.trainer_count > 1:
            # Leaving here would let the others go on without this trainer's data.
            why = "shutdown(failed=True)" if failure is None else describe(failure)
            logger.error(
                "shutdown() while %s is raised: this rank counts as lost, not as done.",
                why,
            )
            self._release(why)
            return
        reason = "shutdown()"
        try:
            for participant in self.participants():
                participant.leave()
                participant.take_home(pull)
                participant.close()
            if self.endpoints.client is not None:
                self.endpoints.client.goodbye()
            if self.endpoints.server is not None:
                self._serve_on(self.endpoints.server)
        except BaseException as error:
            reason = describe(error)
            raise
        finally:
            self._release(reason)
        if self._preemption.asked:
            self._end_process()

    # -- SIGTERM -----------------------------------------------------------------------

    def leave_if_asked(self) -> None:
        """Leaves, and ends this process, if SIGTERM has come; between two steps.

        In jobs of their own it says no goodbye: whoever is started again takes its
        place, and servers wait for that as for a lost trainer.

        Raises:
            PreemptedError: it has left.
        """
        if self.closed or not self._preemption.may_leave:
            return
        for participant in self.participants():
            participant.save_last()
        for participant in self.participants():
            participant.leave()
        self._preemption.left()
        client = self.endpoints.client
        if self.environment.apart is None and client is not None:
            client.goodbye()
        self._release("SIGTERM: it has left and ends")
        self._end_process()

    def _end_process(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._preemption.end()  # an exception would end this thread only
        raise PreemptedError

    def abort(self, reason: str) -> None:
        """Drops everything at once, without goodbye: peers see this rank as lost."""
        if not self.closed and not self.forked:
            self._release(reason)

    def _release(self, reason: str) -> None:
        self._preemption.hold()
        self.closed = True
        open_contexts.discard(self)
        for participant in self.participants():
            participant.close(tell_servers=False)
        self.endpoints.stop(reason)
        self.close_owned()
        self._group.leave()
        self._threads.give_back()
        self.process_group = None
        self.endpoints = Endpoints()
        self._preemption.remove()

    def _after_fork(self) -> None:
        """In a forked child: drops inherited sockets; the core refuses every use."""
        self.forked = True
        close_inherited_sockets(self.endpoints.sockets)


def _failure() -> BaseException | None:
    """What is being handled where this is called, unless it only ended a loop."""
    error = sys.exc_info()[1]
    while isinstance(error, _ENDS_OF_LOOPS):
        error = error.__context__  # handled when the loop ended
    return error


_local = threading.local()
open_contexts: weakref.WeakSet[Context] = weakref.WeakSet()


def set_current(context: Context) -> None:
    """Makes ``context`` the calling thread's current one."""
    _local.context = context


def set_last(context: Context | None) -> None:
    """Makes what ``last()`` of another thread returned the calling thread's."""
    _local.context = context


def last() -> Context | None:
    """The calling thread's context, also one that was shut down."""
    return getattr(_local, "context", None)


def launched_ranks() -> int:
    """``launched_count`` of this process, whatever run is open."""
    return launched_count(os.environ)


def place() -> tuple[Environment | Alone, int, int]:
    """What the environment says here, this process's cores, and whose trainer it is.

    In a run it is what ``init()`` has read; without one the variables are read now.

    Raises:
        ConfigurationError: without a run, one of the variables is wrong.
    """
    opened = last()
    if opened is not None and not opened.closed:
        return opened.environment, opened.cores, max(opened.trainer_rank, 0)
    alone = parse_alone(os.environ)
    return (
        alone,
        max(1, topology.physical_cores() // alone.local_world_size),
        alone.rank,
    )


def any_open() -> bool:
    """Whether a thread of this process has called ``init()`` and not ``shutdown()``."""
    return any(not context.forked for context in open_contexts)


def nothing_to_end() -> bool:
    """Whether ``shutdown()`` in this thread, in a ``finally:`` say, finds no run.

    ``init()`` has failed, or was not called. Where another thread's run is open it is
    likelier that this is the wrong thread, unless something has gone wrong already.
    """
    return last() is None and (sys.exc_info()[1] is not None or not any_open())


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
    if context.forked:
        raise forked()
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
    for context in list(open_contexts):
        context._after_fork()


def _at_exit() -> None:
    """Ends what a script left open; an exit without goodbye counts as a loss."""
    for context in list(open_contexts):
        if context.forked:
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
