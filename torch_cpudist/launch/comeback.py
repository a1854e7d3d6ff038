# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a trainer in a job of its own outlives its servers, or comes back to them.

Whoever meets the loss, a step or a lookup, has the trainer wait here: for servers that
take the place of those that were lost, as a new run at the same meeting point; or for
the same ones, which were only out of reach, or have counted this trainer as lost, and
take it as its next incarnation. Then all that takes part goes on with these. No other
trainer is asked, or waited for, but as ``optimizer/snapshots`` says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch_cpudist.errors import (
    AddressError,
    AuthenticationError,
    ClosedError,
    ConfigMismatchError,
    Error,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
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
    from torch_cpudist.launch.meeting.board import WordStore

_PAUSE_S = 0.2
# At most so long for one try: they may have gone again, and others come.
_CONNECT_S = 10.0
# As long at first for servers that were lost: others of the run may be there still.
_SAME_S = 2.0
# Servers that have counted this trainer as lost are there: they have just said so.
_BACK_S = 10.0
_AWAY = "CPUDIST_REJOIN_S"


def _in_vain(
    apart: SeparateJob, limit_s: float, why: Error | None, same: bool, gone: bool
) -> str:
    """What to do after a wait in vain; ``same``: the lost ones' run is there.

    ``gone``: without one whose process has ended.
    """
    within = f"within {limit_s:g} s ({_AWAY})"
    if same and gone:
        return (
            f"No other servers came {within}: those that it has left still answer at "
            f"{apart.where}. End their job and start both: opt.resume() goes on from "
            "the newest snapshot. torchrun --max-restarts starts a servers' job again "
            "by itself."
        )
    if same or why is None:
        cannot = "" if why is None else f", and cannot be joined ({describe(why)})"
        return (
            f"No other servers came {within}: the run that has lost this trainer, or "
            f"that it has lost, still answers at {apart.where}{cannot}. If its servers "
            "run, start this job again: it joins them. Else end their job and start "
            "both."
        )
    return (
        f"No servers came in their place {within} ({describe(why)}). Start the "
        "servers' job, then this one: opt.resume() goes on from the newest snapshot."
    )


class Outlives(Protocol):
    """What goes on when servers have come back: an optimizer."""

    def cannot_outlive(self, index: int, rejoins: bool) -> str:
        """Why not; empty if it can.

        Args:
            index: which of the run's it is.
            rejoins: with the same servers, which have counted this trainer as lost.
        """

    def let_go(self) -> None:
        """Ends what it has under way with servers that are lost. Idempotent."""

    def learn_losses(self, client: _core.Client) -> None:
        """Asks what servers have carried out that had counted this trainer as lost.

        Before anything goes on with them: from then on they tell of that. Idempotent.
        """

    def go_on_with(self, client: _core.Client, limit_s: float | None) -> None:
        """Goes on with others, or with the same ones.

        Args:
            client: connected to them.
            limit_s: how long trainer 0 may take to load values; ``None``: they have
                theirs, and take this trainer as its next incarnation.

        Raises:
            PeerLostError: they are lost, too.
            Error: it cannot go on.
        """


class Comeback:
    """Of one trainer. Thread safety: any thread; one at a time is at work.

    Attributes:
        lock: who holds it keeps other threads from beginning a recovery; reentrant.
        waited_s: seconds that it was at work, and those for which calls of the clients
            that it has replaced were blocked.
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
        self.waited_s = 0.0
        self._at_work = False
        self._failed: Error | None = None
        self._unanswered = 0  # asks for an incarnation since the last that was issued

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
            if apart is None or isinstance(error, ClosedError):
                raise error
            if not self._limit_s(apart, client):
                raise error
            if why := self._refusal(rejoins=self._may_rejoin(client)):
                raise self._refused(error, why) if apart.rejoin_s else error
            self._at_work = True
            began_s = time.monotonic()
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
                self.waited_s += time.monotonic() - began_s

    @staticmethod
    def _may_rejoin(client: _core.Client | None) -> bool:
        """Whether the servers may be there, without others in their place."""
        if client is None or client.server_ended():
            return False
        return client.counted_lost() or client.out_of_reach()

    @staticmethod
    def _limit_s(apart: SeparateJob, client: _core.Client | None) -> float:
        """How long to wait; 0: not at all."""
        told = client is not None and client.counted_lost()
        back_s = _BACK_S if told and apart.comes_back else 0.0
        return float(apart.rejoin_s) or back_s

    @staticmethod
    def _refused(error: Error, why: str) -> PeerLostError:
        told = str(error).rstrip(".")
        return PeerLostError(f"{told}. {_AWAY} does not help here: {why}")

    def _refusal(self, rejoins: bool) -> str:
        found = [
            one.cannot_outlive(i, rejoins) for i, one in enumerate(self._participants())
        ]
        return next((why for why in found if why), "")

    def _go_on(self, error: Error, apart: SeparateJob, ends: Endpoints) -> None:
        gone: set[int] = set()
        while True:
            limit_s = self._limit_s(apart, ends.client)
            if not limit_s:
                raise error
            for one in self._participants():
                one.let_go()
            if ends.client is not None:
                ends.client.abort("its servers were lost")
            # Servers that have just said so are there: what goes on warns of it.
            told = ends.client is not None and ends.client.counted_lost()
            logger.log(
                logging.INFO if told else logging.WARNING,
                "%s. This trainer waits up to %g s (%s) for servers to come back, or "
                "to be reached again.",
                str(error).rstrip("."),
                limit_s,
                _AWAY,
            )
            found, client = self._await(error, apart, ends, gone, limit_s)
            same = found.run_id == ends.run_id
            if not same:
                gone.add(ends.run_id)
            if ends.client is not None:
                self.waited_s += ends.client.waited_s()
            ends.client, ends.run_id = client, found.run_id
            ends.incarnation = found.incarnation
            ends.sockets |= found.sockets
            self._check_open()  # else whoever ends the run ends this client, too
            for one in self._participants():
                if same:
                    one.learn_losses(client)
            try:
                for one in self._participants():
                    one.go_on_with(client, None if same else limit_s)
            except PeerLostError as again:
                error = again  # the wait begins anew
            else:
                return

    def _await(
        self,
        error: Error,
        apart: SeparateJob,
        ends: Endpoints,
        gone: set[int],
        limit_s: float,
    ) -> tuple[Endpoints, _core.Client]:
        """Waits for servers of the same run, or of none that has gone before it."""
        until = time.monotonic() + limit_s
        same_s = _SAME_S
        while True:
            why: Error | None = None
            same = False
            # Without it their run cannot go on. Those that are left see that nobody is
            # there any more, and do not wait for a snapshot when they are to end.
            if ends.client is not None and ends.client.server_ended():
                gone.add(ends.run_id)
            try:
                store, run = separate_jobs.meet(
                    self._environment,
                    apart,
                    lambda: 0.0 if self._closed() else until - time.monotonic(),
                )
                run_id = int(run["run_id"])
                same = run_id == ends.run_id
                refused = "" if same else self._refusal(rejoins=False)
                if run_id not in gone and not refused:
                    limit = same_s if same else _CONNECT_S
                    left_s = min(limit, max(until - time.monotonic(), 0.1))
                    return self._joined(ends, store, run, left_s)
            except (
                AddressError,
                AuthenticationError,
                OperationTimeoutError,
                PeerLostError,
                ProtocolError,
            ) as failed:
                # AuthenticationError, ProtocolError: a stranger may be where servers
                # are to come; or others have the place of one of the same run, the rest
                # of which ends soon.
                why, refused = failed, ""
            if refused:
                raise self._refused(error, refused) from error
            same_s = min(2 * same_s, _CONNECT_S) if same else _SAME_S
            self._check_open()
            if time.monotonic() >= until:
                told = _in_vain(apart, limit_s, why, same, ends.run_id in gone)
                raise PeerLostError(f"{str(error).rstrip('.')}. {told}") from error
            time.sleep(_PAUSE_S)

    def _check_open(self) -> None:
        if self._closed():
            raise ClosedError(
                "this rank has ended its run while it waited for servers to come back; "
                "call init() to start again."
            )

    def _joined(
        self, ends: Endpoints, store: WordStore, run: dict[str, Any], connect_s: float
    ) -> tuple[Endpoints, _core.Client]:
        made, numbers = self._environment, self._numbers
        if int(run["run_id"]) == ends.run_id:
            # Also where the attempt fails: the next one has the next incarnation.
            unanswered, self._unanswered = self._unanswered, self._unanswered + 1
            ends.incarnation = separate_jobs.next_incarnation(
                store, made, ends.incarnation, unanswered
            )
            self._unanswered = 0
            return separate_jobs.connected(
                made, numbers, run, ends.incarnation, connect_s
            )
        there = (len(run["servers"]), int(run["trainers"]))
        if there != (numbers.server_count, numbers.trainer_count):
            raise ConfigMismatchError(
                f"{there[0]} servers for {there[1]} trainers have come in the place of "
                f"{numbers.server_count} for {numbers.trainer_count}. Start this job "
                "again: opt.resume() deals the newest snapshot anew."
            )
        words = separate_jobs.words_of(made, run)
        self._unanswered = 0  # of the run of before
        incarnation = separate_jobs.keep_id(store, made, words, numbers.trainer_rank)
        found, client = separate_jobs.connected(
            made, numbers, run, incarnation, connect_s
        )
        try:
            if numbers.trainer_rank < numbers.trainer_count:
                how = separate_jobs.AT_ONCE
                separate_jobs.begin(store, words, client, how)
        except BaseException as error:
            client.abort(f"the servers went again: {describe(error)}")
            raise
        return found, client
