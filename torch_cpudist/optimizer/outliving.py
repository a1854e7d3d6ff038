# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How an optimizer goes on when its servers were lost, or when they had lost it.

Its parameters are opened anew: on other servers, to which trainer 0 gives the values of
the newest snapshot while the others wait for that; or on the same ones, whose values
have gone on. What belongs to a trainer itself, its position in the data, counters,
rates, generators, stays as it is: it has trained that far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from torch_cpudist.drivers.base import Driver
from torch_cpudist.errors import ClosedError, InternalError, PeerLostError
from torch_cpudist.log import logger
from torch_cpudist.resuming.recovered import Recovered
from torch_cpudist.resuming.resumable import Resumable
from torch_cpudist.served import state_exchange

if TYPE_CHECKING:
    from torch_cpudist import _core
    from torch_cpudist.launch.run import Run

T = TypeVar("T")


class Outliving:
    """Of one optimizer. From the thread that steps, but where a lookup comes first."""

    def __init__(self, run: Run, driver: Driver, resumable: Resumable) -> None:
        """Has lookups go on.

        Args:
            run: this trainer's.
            driver: of the strategy.
            resumable: knows its snapshots.
        """
        self._run = run
        self._driver = driver
        self._resumable = resumable
        self._recovered = Recovered()
        # This step and time, when the servers were lost that it is without now.
        self._lost: tuple[int, float] | None = None
        self._torn = False  # gradients are of values that were lost with their servers
        self._done: int | None = None  # the step that ends: its gradients are handed on
        # Of steps until a loss of this trainer: not applied, and those of them in part.
        self._unapplied: tuple[int, int] | None = None
        if driver.on_servers is not None:
            driver.on_servers.outlives_by(run.outlive)

    # -- around what asks servers ------------------------------------------------------

    def check(self) -> None:
        """Raises what a recovery has failed with, if one has: nothing is pushed then.

        Raises:
            Error: that one.
        """
        self._run.trainer_client()

    def lasting(self, do: Callable[[], T]) -> T:
        """Does it, again where servers were lost and have come back meanwhile."""
        while True:
            client = self._run.trainer_client()
            try:
                return do()
            except PeerLostError as error:
                self._run.outlive(error, client)

    def step(self, number: int, hand_on: Callable[[], int], before: int) -> int:
        """Hands the gradients of a step on, unless they are of values that were lost.

        Args:
            number: of the step.
            hand_on: does so; returns the updates behind the values here.
            before: those behind them before it.
        """
        # A lookup of another thread that meets a loss waits: what is handed on goes
        # either before the loss, and is counted with it, or after, and is dropped.
        # Not where nothing is outlived, and others may be waited for.
        steady = self._run.steady() if not self._driver.together else nullcontext()
        with steady:
            client = self._run.trainer_client()
            if not self._torn:
                before_it = self._driver.handed_on()
                try:
                    behind = hand_on()
                    self._done = number
                    return behind
                except PeerLostError as error:
                    if self._driver.handed_on() > before_it:
                        self._done = number  # and is counted with those before it
                    self._run.outlive(error, client)
                if self._done == number:
                    return before
            self._recovered.drop(number)
            self._done = number
            return before

    def end_step(self, after: Callable[[], None]) -> None:
        """Does what comes after a step; then all is of the values that are there."""
        try:
            self.lasting(after)
        finally:
            self._torn = False
            self._done = None

    def stats(self) -> dict[str, Any]:
        """``recovered`` of ``DistributedOptimizer.stats``, where servers may be."""
        alone = self._run.environment.apart is None
        if alone or self._driver.together or self._driver.on_servers is None:
            return {}
        return {"recovered": self._recovered.stats()}

    # -- see ``Participant`` -----------------------------------------------------------

    def refusal(self, index: int, averaged: bool, rejoins: bool) -> str:
        """Why it cannot go on with servers that are there again; empty if it can.

        Args:
            index: which of the run's optimizers it is.
            averaged: the model has averages now.
            rejoins: with the same ones, which have counted this trainer as lost.
        """
        if why := self._driver.together:
            return why
        snapshots, there = self._resumable.snapshots, self._driver.on_servers
        if there is None:
            return "its parameters are not on servers."
        if snapshots is None and not rejoins:
            return (
                "opt.resume() was not called, which saves what servers can come back "
                "with."
            )
        if there.opened.id != index:
            return "an earlier DistributedOptimizer of this run was closed."
        if averaged:
            return "the model has averages, inside of opt.averaged()."
        return "" if rejoins or snapshots is None else snapshots.outlives()

    def let_go(self, steps: int) -> None:
        """Gives up the snapshots that were being saved. Idempotent.

        Args:
            steps: that this trainer has made.
        """
        if self._lost is None:  # else those that have come were lost, too
            self._lost = max(steps, self._done or 0), time.monotonic()
        if self._resumable.snapshots is not None:
            self._resumable.snapshots.let_go()

    def learn_losses(self, client: _core.Client) -> None:
        """Learns which of its steps servers have not applied that had lost it.

        Idempotent: what a try before this one has learned stands.
        """
        if self._unapplied is None:
            self._unapplied = self._driver.end(client.carried_out_before())

    def go_on_with(self, client: _core.Client, limit_s: float | None) -> None:
        """Goes on with other servers, or (``None``) with those that had lost it.

        Raises:
            ClosedError: these have let go of the values.
            SnapshotError: there is none, or it cannot be loaded.
            OperationTimeoutError: trainer 0 has not loaded it within ``limit_s``.
            PeerLostError: they are lost, too.
        """
        if limit_s is None:
            self._rejoin(client)
            return
        snapshots = self._resumable.resumed("servers that come back")
        there = self._driver.on_servers
        if there is None:
            raise InternalError("only parameters on servers go on with others")
        there.reopen(client)
        snapshots.meet_again(limit_s)
        if self._run.trainer_rank > 0:
            snapshots.await_values(limit_s)
        elif not there.opened.holds_values():
            state_exchange.store(there, {})  # a snapshot's come in their place
        there.opened.ready()
        self._driver.renew()
        name, step, moment = snapshots.go_on_again()
        there.rebind()
        self._torn = self._done is None
        lost = self._lost or (step, moment)
        self._lost = self._unapplied = None
        updates, seconds = self._recovered.add((step, moment), lost)
        step_too = ""
        if self._torn:
            step_too = f", and the gradients of the step that it is in, {lost[0] + 1}"
        logger.warning(
            "servers have come back, with the values of snapshot %s. Lost are %d "
            "updates of this trainer, of the %.1f s before the servers were lost%s.",
            name,
            updates,
            seconds,
            step_too,
        )

    def _rejoin(self, client: _core.Client) -> None:
        there = self._driver.on_servers
        if there is None or self._lost is None or self._unapplied is None:
            raise InternalError("only parameters on servers are joined again")
        there.reopen(client)
        if not there.opened.holds_values():
            raise ClosedError(
                f"trainer {self._run.trainer_rank} was counted as lost, and meanwhile "
                "all others have ended: servers have let go of the values. Start this "
                "job again; opt.resume() goes on from the newest snapshot."
            )
        there.opened.ready()
        self._driver.renew()
        if self._resumable.snapshots is not None:
            self._resumable.snapshots.begin_anew()
        there.begin_anew()
        there.rebind()
        self._torn = self._done is None
        (lost, torn), (last, _) = self._unapplied, self._lost
        self._unapplied = self._lost = None
        self._recovered.rejoin(last, lost, torn)
        self._tell_of_rejoin(last, lost, torn)

    def _tell_of_rejoin(self, last: int, lost: int, torn: int) -> None:
        in_part = f", {torn} of them on some servers only or in part" if torn else ""
        step_too = ""
        if self._torn:
            step_too = f", and the gradients of the step that it is in, {last + 1}"
        logger.warning(
            "trainer %d, which servers had counted as lost, goes on as incarnation %d "
            "with their values. Lost are %d updates of it, which were handed on and "
            "not applied%s%s.",
            self._run.trainer_rank,
            self._run.incarnation,
            lost,
            in_part,
            step_too,
        )
