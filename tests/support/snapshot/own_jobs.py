# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Servers and trainers in jobs of their own, each a thread of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from patience import PATIENCE_S
from ports import free_port
from torch._C._distributed_c10d import HashStore

import torch_cpudist as cpudist
from torch_cpudist import _core


class Job:
    """One job of one rank. What it raises is raised by ``result``."""

    def __init__(
        self, name: str, variables: Mapping[str, str], body: Callable[[Any], Any]
    ) -> None:
        self._variables = dict(variables) | {"TORCHELASTIC_RUN_ID": name}
        self._body = body
        self._found: Any = None
        self.error: BaseException | None = None
        self.name = name
        self.context: cpudist.Context | None = None
        self.ready = threading.Event()  # it has its context
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.context = context = cpudist.init(
                rank=0,
                world_size=1,
                store=HashStore(),
                network=_core.InprocNetwork(),  # no group, as of a thread
                timeout_s=PATIENCE_S,
                variables=self._variables,
            )
            self.ready.set()
            if context.role == "server":
                context.serve()
            else:
                self._found = self._body(context)
            context.shutdown()
        except BaseException as error:
            self.error = error
            self.end()

    def end(self) -> None:
        """Ends it as a kill does: it says goodbye to nobody."""
        if self.context is not None:
            self.context.abort("the test has killed it")

    def wait(self) -> None:
        """Returns when it is over, however it ended."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), self._thread.name

    def result(self) -> Any:
        """What the body has returned."""
        self.wait()
        self.check()
        return self._found

    def check(self) -> None:
        """Raises what it has failed with."""
        if self.error is not None:
            raise self.error


class Jobs:
    """One of servers, and any number of trainers. A trainer's name is that of its job.

    Args:
        trainers: that wait for each other at the start.
        others: variables of all ranks.
    """

    def __init__(self, trainers: int, others: Mapping[str, str]) -> None:
        self.port = free_port()  # where they meet
        self._variables = {
            "CPUDIST_RENDEZVOUS": f"127.0.0.1:{self.port}",
            **others,
        }
        self._own = {"CPUDIST_TRAINERS": str(trainers), "CPUDIST_REJOIN_S": "1"}
        self.server = self._start("servers", "server", self._own, lambda _: None)
        self._trainers: list[Job] = []

    def kill_server(self) -> None:
        """Ends the server as a kill does."""
        assert self.server.ready.wait(PATIENCE_S)
        self.server.end()
        self.server.wait()

    def restart_server(self, **others: str) -> None:
        """Starts it again, after ``kill_server``."""
        more = self._own | others
        self.server = self._start("servers", "server", more, lambda _: None)

    def _start(
        self, name: str, role: str, more: Mapping[str, str], body: Callable[[Any], Any]
    ) -> Job:
        variables = self._variables | {"CPUDIST_ROLE": role} | dict(more)
        return Job(name, variables, body)

    def trainer(self, name: str, body: Callable[[Any], Any], **others: str) -> Job:
        """Starts one; again, if there was one of that name."""
        self._trainers.append(self._start(name, "trainer", others, body))
        return self._trainers[-1]

    def wait(self, event: threading.Event) -> None:
        """Returns when it is set; raises what a trainer has failed with meanwhile."""
        until = time.monotonic() + PATIENCE_S
        while not event.wait(0.05):
            assert time.monotonic() < until
            self.check()

    def check(self) -> None:
        """Raises what a trainer has failed with."""
        for job in self._trainers:
            job.check()

    def end(self) -> None:
        """Ends what still runs."""
        for job in [*self._trainers, self.server]:
            job.end()
        for job in [*self._trainers, self.server]:
            job.wait()


@contextlib.contextmanager
def own_jobs(trainers: int, **others: str) -> Iterator[Jobs]:
    """Jobs that end with the block; ``others``: variables of all ranks."""
    jobs = Jobs(trainers, others)
    try:
        yield jobs
    finally:
        jobs.end()
