# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Running several ranks inside a test: as threads of one process, or as processes.

Threads share one in-process network, which can drop, delay, duplicate, reorder and cut;
they are fast and need no sockets. Processes use real sockets and can be killed and
stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch._C._distributed_c10d import FileStore, HashStore

from torch_cpudist import _core
from torch_cpudist.errors import OperationTimeoutError, describe
from torch_cpudist.launch.context import Context
from torch_cpudist.log import logger
from torch_cpudist.runtime import init

T = TypeVar("T")
Report = Callable[[Any], None]

# The first optimizer of torch imports dynamo, which takes a second: once, not per rank.
_PRELOAD = ["torch_cpudist.testing", "torch._dynamo"]


class Turns:
    """Gives the threads of ``run_ranks`` turns in the order of a schedule.

    A test decides with it which trainer reads and steps when, so that asynchronous
    training is the same in every run.
    """

    def __init__(self, schedule: Sequence[int], deadline_s: float = 60.0) -> None:
        """Makes the turns, to be shared by all ranks.

        Args:
            schedule: the trainer rank of each turn.
            deadline_s: longest wait for one turn.
        """
        self._schedule = schedule
        self._deadline_s = deadline_s
        self._begun = [threading.Event() for _ in range(len(schedule) + 1)]
        self._begun[0].set()

    def take(self, rank: int, turn: Callable[[int], None]) -> None:
        """Runs ``turn(position)`` at every position that the schedule gives ``rank``.

        Raises:
            OperationTimeoutError: a turn before has not ended in time.
        """
        for position, owner in enumerate(self._schedule):
            if owner != rank:
                continue
            if not self._begun[position].wait(self._deadline_s):
                raise OperationTimeoutError(
                    f"turn {position}, of rank {rank}, did not come within "
                    f"{self._deadline_s} s"
                )
            turn(position)
            self._begun[position + 1].set()


class _Ranks:
    """What the threads of one ``run_ranks`` share."""

    def __init__(self, count: int) -> None:
        self.contexts: list[Context | None] = [None] * count
        self.results: list[Any] = [None] * count
        self.errors: list[tuple[int, BaseException]] = []
        self.lock = threading.Lock()

    def fail(self, rank: int, error: BaseException) -> None:
        with self.lock:
            self.errors.append((rank, error))

    def abort(self, reason: str) -> None:
        for context in self.contexts:
            if context is not None:
                context.abort(reason)


def _run_rank(
    ranks: _Ranks,
    rank: int,
    fn: Callable[[Context], Any],
    arguments: Mapping[str, Any],
) -> None:
    """What the thread of one rank runs."""
    context = None
    try:
        context = init(rank=rank, **arguments)
        ranks.contexts[rank] = context
        if context.role == "server":
            context.serve()
        else:
            ranks.results[rank] = fn(context)
        context.shutdown()
    except BaseException as error:
        ranks.fail(rank, error)
        if context is not None:
            context.abort(describe(error))


def run_ranks(
    fn: Callable[[Context], T],
    trainers: int,
    *,
    servers: int = 0,
    network: _core.InprocNetwork | None = None,
    timeout_s: float = 60.0,
    variables: Mapping[str, str] | None = None,
) -> list[T]:
    """Runs ``fn`` on every trainer, each a thread of this process.

    Every rank calls ``init()``, runs ``fn`` (dedicated servers serve instead) and calls
    ``shutdown()``. When one rank fails, the others are aborted. torch's global random
    generator is shared by the threads: use generators of your own.

    Args:
        fn: called with the rank's context, which is the thread's current one.
        trainers: how many.
        servers: dedicated servers besides; 0 lets every trainer serve.
        network: to inject faults and count them; by default one without faults.
        timeout_s: longest time for everything; then all stacks are dumped to stderr.
        variables: environment of every rank, in the place of ``os.environ``.

    Returns:
        The results by trainer rank.

    Raises:
        OperationTimeoutError: names the ranks that did not end in time.
        BaseException: what the first rank that failed raised, with its rank as a note.
    """
    count = trainers + servers
    ranks = _Ranks(count)
    arguments = {
        "world_size": count,
        "store": HashStore(),
        "servers": servers,
        "network": network if network is not None else _core.InprocNetwork(),
        "timeout_s": timeout_s,
        "variables": variables or {},
    }
    threads = [
        threading.Thread(
            target=_run_rank,
            args=(ranks, rank, fn, arguments),
            name=f"rank {rank}",
            daemon=True,
        )
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late and not ranks.errors:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    if late:
        ranks.abort("the test's time is over")
    if ranks.errors:
        rank, error = ranks.errors[0]
        error.add_note(f"raised by rank {rank} of {count}")
        raise error
    if late:
        raise OperationTimeoutError(f"ranks {late} did not end within {timeout_s:g} s")
    return ranks.results[servers:]


class _Warnings(logging.Handler):
    """Tells what the package warns of."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell("warning", record.getMessage())


def _process_body(
    fn: Callable[[Context, Report], Any],
    prepare: Callable[[int], None] | None,
    rank: int,
    world_size: int,
    servers: int,
    folder: str,
    variables: dict[str, str],
    pipe: Connection,
) -> None:
    """What one rank's process runs; what it tells goes through ``pipe`` as JSON."""
    faulthandler.enable()
    os.environ.update(variables)

    telling = threading.Lock()

    def tell(kind: str, value: Any) -> None:
        entry = {"kind": kind, "value": value, "time_s": time.monotonic()}
        with telling:
            pipe.send_bytes(json.dumps(entry).encode())

    logger.addHandler(_Warnings(tell))
    context = None
    try:
        if prepare is not None:
            prepare(rank)
        store = FileStore(str(Path(folder) / "store"), world_size)
        context = init(rank=rank, world_size=world_size, store=store, servers=servers)
        result = None
        if context.role == "server":
            tell("serving", None)
            context.serve()
        else:
            result = fn(context, lambda value: tell("report", value))
        context.shutdown()
        tell("result", result)
    except BaseException as error:
        tell("error", {"type": type(error).__name__, "text": str(error)})
        if context is not None:
            context.abort(describe(error))


class ProcessRanks:
    """Ranks as processes over real sockets; reaped by process id when the block ends.

    Example:
        >>> with ProcessRanks(train, 2) as ranks:
        ...     ranks.expect(0, "report", 10.0)
        ...     ranks.signal(1, signal.SIGKILL)
        ...     print(ranks.expect(0, "error", 10.0)["value"]["type"])
    """

    def __init__(
        self,
        fn: Callable[[Context, Report], Any],
        world_size: int,
        *,
        servers: int = 0,
        variables: Mapping[str, str] | None = None,
        prepare: Callable[[int], None] | None = None,
    ) -> None:
        """Starts the ranks.

        Args:
            fn: a module's own function, called on every trainer with its context and a
                function that reports a JSON value to the test. Returns a JSON value.
            world_size: ranks, dedicated servers included.
            servers: how many of them only serve.
            variables: added to the environment of every rank.
            prepare: a module's own function, called in the process of every rank with
                its number before it joins the run: to enter another network, say.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="cpudist-ranks-")
        method = multiprocessing.get_context("forkserver")
        method.set_forkserver_preload(_PRELOAD)
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = method.Pipe(duplex=False)
            process = method.Process(
                target=_process_body,
                args=(
                    fn,
                    prepare,
                    rank,
                    world_size,
                    servers,
                    self._folder.name,
                    dict(variables or {}),
                    theirs,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        pid = self.processes[rank].pid
        if pid is None:
            raise OperationTimeoutError(f"rank {rank} was not started")
        return pid

    def signal(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal to a rank; returns the monotonic time in seconds."""
        now_s = time.monotonic()
        os.kill(self.pid(rank), number)
        return now_s

    def expect(self, rank: int, kind: str, timeout_s: float) -> dict[str, Any]:
        """Waits for the next message of a rank that is of a kind.

        Args:
            rank: whose.
            kind: ``"report"``, ``"serving"``, ``"warning"``, ``"result"`` or
                ``"error"``.
            timeout_s: longest wait.

        Returns:
            ``value``, and ``time_s``, the monotonic time at which it was sent.

        Raises:
            OperationTimeoutError: none came, or the rank said that it failed or ended.
        """
        deadline = time.monotonic() + timeout_s
        while self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
            try:
                entry: dict[str, Any] = json.loads(self._pipes[rank].recv_bytes())
            except EOFError:
                break
            if entry["kind"] == kind:
                return entry
            if entry["kind"] in ("error", "result"):
                raise OperationTimeoutError(
                    f"rank {rank}: expected {kind}, found {entry['kind']} "
                    f"{entry['value']}"
                )
        raise OperationTimeoutError(f"rank {rank}: no {kind} within {timeout_s:g} s")

    def results(self, timeout_s: float) -> list[Any]:
        """Waits for the results of all ranks; ``None`` of dedicated servers."""
        deadline = time.monotonic() + timeout_s
        return [
            self.expect(rank, "result", max(0.0, deadline - time.monotonic()))["value"]
            for rank in range(len(self.processes))
        ]

    def exit_codes(self, timeout_s: float) -> list[int | None]:
        """Waits for all ranks to end; ``None`` for one that has not in time."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def __enter__(self) -> ProcessRanks:
        """The ranks run already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends what still runs, stopped processes too, and waits for it."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join(10.0)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()
