# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a rank does when SIGTERM comes: leave, have all saved, or end at once.

A trainer that others can do without hands on what it has at the end of its step, and
leaves; servers in a job of their own ask trainer 0 for a snapshot. All others can only
tell whoever waits for them, and end as without a handler. docs/launch.md has the table.
"""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

from torch_cpudist.errors import Error, describe
from torch_cpudist.launch.run import Run
from torch_cpudist.launch.wanted_saves import WantedSaves
from torch_cpudist.log import logger
from torch_cpudist.machine.termination import Termination

_LOOK_S = 0.05
# For the words of who ends; they go to sockets, which take them at once or never.
_TELL_S = 2.0


class Preemption:
    """Of one run. Thread safety: any thread, but for ``install`` and ``remove``.

    What it decides it does in the thread that ``Termination`` has; the training thread
    asks at the end of a step whether it is to leave.

    Attributes:
        may_leave: the training thread is to leave now, between two steps.
    """

    def __init__(self, run: Run) -> None:
        """Notices SIGTERM from now on, as ``Termination.install`` allows.

        Args:
            run: this rank's; its ``CPUDIST_GRACE_S`` of 0 leaves SIGTERM alone.
        """
        # A run that nobody has any more is not kept by a handler.
        self._reference = weakref.ref(run)
        self.may_leave = self._left = self._ends = False
        grace_s = run.environment.grace_s
        self._termination = Termination(grace_s, self._noticed, self._is_over)
        if grace_s and not self._termination.install():
            logger.info(
                "SIGTERM is left to the handler that is there, or init() was not called"
                " in the main thread: CPUDIST_GRACE_S has no effect"
            )

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has come: this process is about to end."""
        return self._termination.asked

    def left(self) -> None:
        """The training thread has left: what ends now is no loss."""
        self._left = True

    def hold(self) -> None:
        """Returns never, where the process is being ended: its status is SIGTERM's."""
        while self._ends:
            time.sleep(_LOOK_S)

    def remove(self) -> None:
        """The run is over. Idempotent."""
        self._termination.remove()

    def end(self) -> None:
        """Ends the process as SIGTERM does; for a thread that is not the main one."""
        self._termination.end()

    def _is_over(self) -> bool:
        run = self._reference()
        return run is None or run.closed

    def _noticed(self) -> None:
        run = self._reference()
        if run is None:
            return self._termination.end()
        try:
            if why := _stays(run):
                self._end_now(run, why)
            elif run.role == "server":
                self._await_snapshot(run)
            else:
                self._await_leaving(run)
        except Exception as error:  # whatever it is, nobody waits for the grace
            self._end_now(run, describe(error))

    # -- a trainer ---------------------------------------------------------------------

    def _await_leaving(self, run: Run) -> None:
        """Returns once the training thread leaves, or there is nobody to leave."""
        logger.warning(
            "SIGTERM: %s leaves at the end of its step, and ends within %d s "
            "(CPUDIST_GRACE_S).",
            _who(run),
            run.environment.grace_s,
        )
        self.may_leave = True
        self._while_whole(run)

    def _while_whole(self, run: Run) -> None:
        """Returns when the run is over; a loss ends the process before that."""
        while not (self._left or run.closed):
            try:
                run.check_lost()
            except Error as error:
                if not (self._left or run.closed):
                    self._end_now(run, describe(error))
            time.sleep(_LOOK_S)

    # -- a server ----------------------------------------------------------------------

    def _await_snapshot(self, run: Run) -> None:
        """Ends the process when trainer 0 has saved one, or none can come."""
        if run.environment.apart is None:
            # The launcher means trainers, too: trainer 0 saves one, and all leave.
            return self._while_whole(run)
        server, folder = run.endpoints.server, run.environment.snapshot_dir
        if server is None or folder is None:
            return self._end_now(run, "it has ended")
        wanted = WantedSaves(Path(folder), run.run_id)
        if not wanted.ask():
            return self._end_now(run, "no trainer saves snapshots of this run")
        logger.warning(
            "SIGTERM: %s ends when a snapshot was saved, within %d s "
            "(CPUDIST_GRACE_S).",
            _who(run),
            run.environment.grace_s,
        )
        while not run.closed:
            if wanted.answered():
                return self._end_now(run, "a snapshot was saved")
            if not server.stats()["present"]:
                wanted.withdraw()
                return self._end_now(run, "no trainer is there to save a snapshot")
            time.sleep(_LOOK_S)
        return wanted.withdraw()

    # -- the end -----------------------------------------------------------------------

    def _end_now(self, run: Run, why: str) -> None:
        self._ends = True
        logger.info("SIGTERM: %s ends: %s", _who(run), why)
        stop = run.endpoints.stop
        teller = threading.Thread(target=stop, args=(f"SIGTERM: {why}",), daemon=True)
        teller.start()
        teller.join(_TELL_S)
        self._termination.end()


def _who(run: Run) -> str:
    if run.role == "server":
        return f"server {run.shard_id}"
    return f"trainer {run.trainer_rank}"


def _stays(run: Run) -> str:
    """Why nothing is to be waited for; empty if something is."""
    if run.closed:
        return "its run is over"
    if run.role == "server":
        saves = run.environment.snapshot_dir is not None
        return "" if saves else "CPUDIST_SNAPSHOT_DIR is not set"
    participants = run.participants()
    if run.endpoints.server is not None:
        if run.environment.world_size == 1 and any(p.saves() for p in participants):
            return ""
        return "its part of the model ends with it"
    if not participants:
        return "it trains nothing yet"
    whys = [one.cannot_leave() for one in participants]
    return next((why for why in whys if why), "")
