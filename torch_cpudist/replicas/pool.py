# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The threads that replicas run on, with the caller's modes of torch."""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from torch_cpudist.errors import (
    ClosedError,
    ForkedProcessError,
    InvalidArgumentError,
)
from torch_cpudist.launch import context
from torch_cpudist.machine import topology

T = TypeVar("T")
# Between two looks for an interrupt; results wake the waiting thread before.
_POLL_S = 1.0
_END_S = 10.0


@dataclass(frozen=True)
class Modes:
    """What is thread-local in torch and in this package, as the caller has it."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    context: context.Context | None

    @staticmethod
    def here() -> Modes:
        """Those of the calling thread."""
        return Modes(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            context.last(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same modes in another thread."""
        context.set_last(self.context)
        try:
            with (
                torch.inference_mode(self.inference),
                torch.set_grad_enabled(self.grad),
                torch.autocast(
                    "cpu",
                    self.autocast_dtype,
                    enabled=self.autocast,
                    cache_enabled=self.autocast_cache,
                ),
            ):
                yield
        finally:
            context.set_last(None)


@dataclass
class _Worker:
    """One thread's letter box, and its answer to the newest letter."""

    inbox: queue.SimpleQueue[tuple[int, Callable[[], Any]] | None] = field(
        default_factory=queue.SimpleQueue
    )
    asked: int = 0
    answered: int = 0
    value: Any = None
    error: BaseException | None = None


def _serve(
    worker: _Worker,
    done: queue.SimpleQueue[int],
    num_threads: int,
    cores: Sequence[int] | None,
) -> None:
    """What a replica's thread runs until it is sent ``None``."""
    if cores is not None:
        topology.pin_thread(cores)
    # OpenMP's count belongs to a thread, so that every replica sets its own.
    torch.set_num_threads(num_threads)
    done.put(0)
    while (letter := worker.inbox.get()) is not None:
        ticket, call = letter
        del letter
        try:
            worker.value = call()
        except BaseException as error:
            worker.error = error
        del call
        worker.answered = ticket
        done.put(ticket)


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.inbox.put(None)


class ReplicaThreads:
    """As many threads as replicas. One ``run`` at a time.

    They exist until ``close()`` or until nobody holds this object any more.
    """

    def __init__(
        self,
        count: int,
        num_threads: int,
        cores: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Starts the threads.

        Args:
            count: how many.
            num_threads: torch threads of each.
            cores: of each; ``None`` leaves it to the kernel.
        """
        self.count = count
        self.num_threads = num_threads
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._closed = False
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._workers = [_Worker() for _ in range(count)]
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(worker, self._done, num_threads, cores and cores[index]),
                name=f"cpudist-replica-{index}",
                daemon=True,
            )
            for index, worker in enumerate(self._workers)
        ]
        before = torch.get_num_threads()
        self._finalizer = weakref.finalize(self, _end, self._workers)
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._done.get()
        torch.set_num_threads(before)  # MKL's is one for all threads

    @contextmanager
    def session(self) -> Iterator[None]:
        """Several ``run`` calls that belong together.

        Raises:
            ClosedError, ForkedProcessError: there are no threads.
            InvalidArgumentError: another session is under way.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                "this process was forked after its ReplicaExecutor was made, whose "
                "threads are the parent's. Make one in this process."
            )
        if not self._busy.acquire(blocking=False):
            raise InvalidArgumentError(
                "a ReplicaExecutor is at work already: call it from one thread at a "
                "time, and not from its loss_fn."
            )
        before = torch.get_num_threads()
        try:
            if self._closed:
                raise ClosedError("this ReplicaExecutor is closed. Make a new one.")
            if before != self.num_threads:
                torch.set_num_threads(self.num_threads)
            self._settle()
            yield
        finally:
            if before != self.num_threads:
                torch.set_num_threads(before)
            self._busy.release()

    def run(self, calls: Sequence[Callable[[], T]], in_turn: bool = False) -> list[T]:
        """Runs a call on each thread, and waits for all. Inside of ``session``.

        An interrupt ends the wait; the threads finish what they are at, and the next
        ``session`` waits for that.

        Args:
            calls: at most as many as threads; the first is for the first one.
            in_turn: not at the same time.

        Raises:
            BaseException: what the first call that failed raised, once all have ended.
        """
        modes = Modes.here()
        workers = self._workers[: len(calls)]
        for worker, call in zip(workers, calls, strict=True):
            self._send(worker, modes, call)
            if in_turn:
                self._settle()
        self._settle()
        values = [worker.value for worker in workers]
        errors = [(i, w.error) for i, w in enumerate(workers) if w.error is not None]
        for worker in workers:
            worker.value = worker.error = None
        if errors:
            index, first = errors[0]
            if self.count > 1:
                first.add_note(f"in replica {index} of {self.count}")
            raise first
        return values

    def _send(self, worker: _Worker, modes: Modes, call: Callable[[], Any]) -> None:
        variables = contextvars.copy_context()

        def as_caller() -> Any:
            with modes.entered():
                return variables.run(call)

        worker.value = worker.error = None
        worker.asked += 1
        worker.inbox.put((worker.asked, as_caller))

    def _settle(self) -> None:
        """Waits until no thread has anything to do."""
        while any(worker.answered != worker.asked for worker in self._workers):
            try:
                self._done.get(timeout=_POLL_S)
            except queue.Empty:
                continue

    def close(self) -> None:
        """Ends the threads, once each has finished what it is at. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._finalizer()
        if os.getpid() == self._pid:
            for thread in self._threads:
                thread.join(_END_S)
