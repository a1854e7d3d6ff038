# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tells servers of an optimizer that they hold nothing of, and waits for all trainers.

Servers compare what every trainer opens, and tell those who wait of a difference. So a
strategy that averages among trainers opens something too: an empty parameter set.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from torch_cpudist import _core
from torch_cpudist.errors import (
    AddressError,
    ConfigMismatchError,
    OperationTimeoutError,
)
from torch_cpudist.served.room import mismatch_key

if TYPE_CHECKING:
    from torch_cpudist.launch.run import Run

_POLL_S = 0.005


class ServerMark:
    """An empty parameter set on all servers. Cost: two requests to each."""

    def __init__(self, run: Run, opening: str) -> None:
        """Opens it, and waits until every trainer has. Collective.

        Args:
            run: this trainer's.
            opening: name of the optimizer that is built, equal on all trainers.

        Raises:
            ConfigMismatchError: another trainer opened something else; on all.
            PeerLostError, OperationTimeoutError: a server or trainer does not answer.
        """
        layout = _core.ParamSetLayout(configs=[], tables=[], blocks=[])
        self._opened: _core.ParamSet | None = run.trainer_client().open(layout)
        self._opened.ready()
        if run.process_group is not None and run.trainer_count > 1:
            wait_for_all(
                run,
                opening,
                "built their optimizer",
                "Build the same ones, in the same order, on all.",
            )

    def close(self, tell_servers: bool) -> None:
        """Ends it. Idempotent."""
        if self._opened is not None and tell_servers:
            self._opened.close()
        self._opened = None


def _key(opening: str, what: str) -> str:
    return f"cpudist/opening/{opening}/{what}"


def wait_for_all(run: Run, opening: str, done: str, remedy: str) -> None:
    """Returns when all trainers are here, or one has said that it cannot.

    Args:
        run: this trainer's, which has a torch.distributed group.
        opening: name of what they come to, once in a run.
        done: what those who are here did, for messages.
        remedy: what to do if not all come.

    Raises:
        ConfigMismatchError, PeerLostError, OperationTimeoutError: they will not.
    """
    store = distributed_c10d._get_default_store()
    deadline = time.monotonic() + run.environment.round_deadline_ms / 1000
    count = store.add(_key(opening, "here"), 1)
    while count < run.trainer_count:
        if store.check([_key(opening, "mismatch")]):
            raise ConfigMismatchError(store.get(_key(opening, "mismatch")).decode())
        run.check_lost()
        if time.monotonic() > deadline:
            raise OperationTimeoutError(
                f"{count} of {run.trainer_count} trainers {done} within "
                f"CPUDIST_ROUND_DEADLINE_MS. {remedy}"
            )
        time.sleep(_POLL_S)
        count = store.add(_key(opening, "here"), 0)


def tell_mismatch(run: Run, opening: str, error: ConfigMismatchError) -> None:
    """Tells trainers that wait in ``ServerMark`` that this one has opened another set.

    Servers cannot: an empty set is ready as soon as trainer 0 has opened it. Nor can
    they while trainers compare their memory.
    """
    if run.rendezvous is not None and run.trainer_count > 1:
        with contextlib.suppress(AddressError):
            run.rendezvous.show(mismatch_key(opening), str(error))
    if run.process_group is not None and run.trainer_count > 1:
        store = distributed_c10d._get_default_store()
        store.set(_key(opening, "mismatch"), str(error))
