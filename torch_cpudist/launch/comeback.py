# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a trainer in a job of its own outlives its servers.

Whoever meets the loss, a step or a lookup, has the trainer wait here for servers that
take the place of those that were lost, as a new run at the same meeting point. Then
all that takes part goes on with these. No other trainer is asked, or waited for, but as
``optimizer/snapshots`` says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from torch_cpudist.errors import (
    AddressError,
    AuthenticationError,
    ClosedError,
    ConfigMismatchError,
    Error,
    OperationTimeoutError,
    PeerLostError,
    describe,
)
from torch_cpudist.launch import separate_jobs
from torch_cpudist.launch.endpoints import Endpoints
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Numbers
from torch_cpudist.log import logger
from torch_cpudist.settings.jobs import SeparateJob

if TYPE_CHECKING:
    from torch_cpudist import _core

_PAUSE_S = 0.2
# At most so long for one try: they may have gone again, and others come.
_CONNECT_S = 10.0
_AWAY = "CPUDIST_REJOIN_S"


def _in_vain(apart: SeparateJob, why: Error | None) -> str:
    """What to do after a wait in vain; ``why``: ``None`` where the lost ones answer."""
    within = f"within {apart.rejoin_s} s ({_AWAY})"
    if why is None:
        return (
            f"No other servers came {within}: the run that has lost this trainer, or "
            f"that it has lost, still answers at {apart.where}. If its servers run, "
            "start this job again: it joins them. Else end their job and start both."
        )
    return (
        f"No servers came in their place {within} ({describe(why)}). Start the "
        "servers' job, then this one: opt.resume() goes on from the newest snapshot."
    )


class Outlives(Protocol):
    """What goes on when servers have come back: an optimizer."""

    def cannot_outlive(self, index: int) -> str:
        """Why not; empty if it can. ``index``: which of the run's it is."""

    def let_go(self) -> None:
        """Ends what it has under way with servers that are lost. Idempotent."""

    def go_on_with(self, client: _core.Client, limit_s: float) -> None:
        """Goes on with others.

        Args:
            client: connected to them.
            limit_s: how long trainer 0 may take to load values.

        Raises:
            PeerLostError: they are lost, too.
            Error: it cannot go on.
        """


class Comeback:
    """Of one trainer. Thread safety: any thread; one at a time is at work.

    Attributes:
        lock: who holds it keeps other threads from beginning a recovery; reentrant.
    """

    def __init__(
        self,
        environment: Environment,
        numbers: Numbers,
        ends: Callable[[], Endpoints],
        participants: Callable[[], Sequence[Outlives]],
        closed: Callable[[], bool],
    ) -> None:
        """Does nothing yet.

        Args:
            environment: of this rank.
            numbers: what it is.
            ends: its client now, which is replaced.
            participants: what goes on, oldest first.
            closed: whether the run has ended here, by any thread.
        """
        apart = environment.apart
        self._apart = apart if apart is not None and apart.role == "trainer" else None
        self._environment = environment
        self._numbers = numbers
        self._ends = ends
        self._participants = participants
        self._closed = closed
        self.lock = threading.RLock()
        self._at_work = False
        self._failed: Error | None = None

    def check(self) -> None:
        """Raises what it could not go on for, if it could not."""
        if self._failed is not None:
            raise self._failed

    def outlive(self, error: Error, client: _core.Client | None) -> None:
        """Returns when this trainer can go on, with another client.

        Args:
            error: what a call has failed with.
            client: whose call it was; ``None``: of one that was replaced since.

        Raises:
            Error: ``error``, where nothing is to be waited for; else why it cannot go
                on. Later calls raise it again.
        """
        with self.lock:
            self.check()
            if self._at_work:
                raise error
            ends = self._ends()
            if ends.client is not client:
                return  # another thread was here first
            apart = self._apart
            if apart is None or not apart.rejoin_s or isinstance(error, ClosedError):
                raise error
            if why := self._refusal():
                told = str(error).rstrip(".")
                raise PeerLostError(f"{told}. {_AWAY} does not help here: {why}")
            self._at_work = True
            try:
                self._go_on(error, apart, ends)
            except BaseException as failed:
                self._failed = failed if isinstance(failed, Error) else error
                # Others may be there already, without values to train on: what does
                # not ask here fails, and these servers see that it is lost.
                if ends.client is not None and ends.client is not client:
                    ends.client.abort(f"it could not go on: {describe(failed)}")
                raise
            finally:
                self._at_work = False

    def _refusal(self) -> str:
        found = [one.cannot_outlive(i) for i, one in enumerate(self._participants())]
        return next((why for why in found if why), "")

    def _go_on(self, error: Error, apart: SeparateJob, ends: Endpoints) -> None:
        gone = {ends.run_id}
        while True:
            for one in self._participants():
                one.let_go()
            if ends.client is not None:
                ends.client.abort("its servers were lost")
            logger.warning(
                "%s. This trainer waits up to %d s (%s) for servers to come back.",
                str(error).rstrip("."),
                apart.rejoin_s,
                _AWAY,
            )
            found, client = self._await(error, apart, gone)
            gone.add(found.run_id)
            ends.client, ends.run_id = client, found.run_id
            ends.incarnation = found.incarnation
            ends.sockets |= found.sockets
            self._check_open()  # else whoever ends the run ends this client, too
            try:
                for one in self._participants():
                    one.go_on_with(client, float(apart.rejoin_s))
            except PeerLostError as again:
                error = again  # the wait begins anew
            else:
                return

    def _await(
        self, error: Error, apart: SeparateJob, gone: set[int]
    ) -> tuple[Endpoints, _core.Client]:
        """Waits for servers of a run that is none of those that have gone."""
        until = time.monotonic() + apart.rejoin_s
        while True:
            why: Error | None = None
            try:
                found = self._look(apart, until, gone)
                if found is not None:
                    return found
            except (
                AddressError,
                AuthenticationError,
                OperationTimeoutError,
                PeerLostError,
            ) as failed:
                # AuthenticationError: a stranger may be where servers are to come.
                why = failed
            self._check_open()
            if time.monotonic() >= until:
                raise PeerLostError(
                    f"{str(error).rstrip('.')}. {_in_vain(apart, why)}"
                ) from error
            time.sleep(_PAUSE_S)

    def _check_open(self) -> None:
        if self._closed():
            raise ClosedError(
                "this rank has ended its run while it waited for servers to come back; "
                "call init() to start again."
            )

    def _look(
        self, apart: SeparateJob, until: float, gone: set[int]
    ) -> tuple[Endpoints, _core.Client] | None:
        made, numbers = self._environment, self._numbers
        store, run = separate_jobs.meet(
            made, apart, lambda: 0.0 if self._closed() else until - time.monotonic()
        )
        if int(run["run_id"]) in gone:
            return None  # not ended yet
        there = (len(run["servers"]), int(run["trainers"]))
        if there != (numbers.server_count, numbers.trainer_count):
            raise ConfigMismatchError(
                f"{there[0]} servers for {there[1]} trainers have come in the place of "
                f"{numbers.server_count} for {numbers.trainer_count}. Start this job "
                "again: opt.resume() deals the newest snapshot anew."
            )
        incarnation = separate_jobs.guarded(
            apart, lambda: separate_jobs.keep_id(store, made, numbers.trainer_rank)
        )
        connect_s = min(_CONNECT_S, max(until - time.monotonic(), 0.1))
        ends, client = separate_jobs.connected(
            made, numbers, run, incarnation, connect_s
        )
        try:
            if numbers.trainer_rank < numbers.trainer_count:
                separate_jobs.begin(apart, store, client, separate_jobs.AT_ONCE)
        except BaseException as error:
            client.abort(f"the servers went again: {describe(error)}")
            raise
        return ends, client
