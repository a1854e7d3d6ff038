# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who of the ranks that ``init()`` waits for has ended meanwhile.

Of a process of this host the system tells it at once. Whoever notices an end leaves a
note in the store where ranks meet, which those on other hosts find.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_cpudist.backends.meeting import PREFIX, write
from torch_cpudist.errors import PeerLostError
from torch_cpudist.machine.processes import Process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from torch_cpudist.launch.layout import Member

# How often to look for a note, where there are other hosts.
_ASK_S = 0.25
# A process closes its sockets before it has ended; with much memory long before.
_END_S = 2.0
_TEXT_MAX = 500


class RollCall:
    """The other ranks of a run, from the moment that all have come.

    Thread safety: all members.
    """

    def __init__(self, store: Store, own: int) -> None:
        """Knows nobody yet.

        Args:
            store: where ranks meet.
            own: rank of this process.
        """
        self._store = store
        self._own = own
        self._lock = threading.Lock()
        self._run = ""
        self._others: dict[int, tuple[str, Process]] = {}
        self._elsewhere = False
        self._ask_next = 0.0
        self._error: PeerLostError | None = None

    def begin(self, run_id: int, members: Sequence[Member], certain: bool) -> None:
        """Watches these from now on, in the place of others.

        Args:
            run_id: of the meeting that has found them.
            members: all ranks.
            certain: they have come to this meeting; else what an earlier run has left
                in the store may be among them, whose processes have ended long ago.
        """
        with self._lock:
            self._forget()
            self._error = None
            self._run = f"{PREFIX}/{run_id}"
            for member in members:
                if member.rank == self._own:
                    continue
                process = Process(member.process)
                self._elsewhere = self._elsewhere or not process.known
                if certain or not process.has_ended():
                    self._others[member.rank] = (member.host, process)
                else:
                    process.close()

    def end(self) -> None:
        """Watches nobody any more. Idempotent."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        for _, process in self._others.values():
            process.close()
        self._others = {}
        self._elsewhere = False

    def come_in(self) -> None:
        """This rank needs no other for ``init()`` any more; its end is no loss then.

        A store that has failed is no error here: nobody else can ask it.
        """
        with contextlib.suppress(RuntimeError, OSError):
            write(self._store, self._in(self._own), "1")

    def _in(self, rank: int) -> str:
        return f"{self._run}/in/{rank}"

    def look(self) -> PeerLostError | None:
        """The error of a rank that has ended before ``init()`` was done with it.

        Asks the store only if there is something to ask; one that has failed is no
        error here.
        """
        with self._lock:
            if self._error is None and self._others:
                gone = self._gone()
                text = self._tell(gone) if gone else self._told()
                self._error = PeerLostError(text) if text else None
            return self._error

    def after_failure(self) -> PeerLostError | None:
        """The same once the store has failed, whose end is rank 0's or an agent's."""
        with self._lock:
            if self._error is None and 0 in self._others:
                _, process = self._others[0]
                if process.has_ended(_END_S):
                    self._error = PeerLostError(self._text(self._gone()))
            return self._error

    def _gone(self) -> list[int]:
        return [rank for rank, (_, one) in self._others.items() if one.has_ended()]

    def _tell(self, gone: Sequence[int]) -> str:
        """What to say of those that have ended, as somebody may have said already."""
        for rank in gone:
            text = self._text([rank])
            try:
                if self._store.check([self._in(rank)]):
                    _, process = self._others.pop(rank)
                    process.close()
                    continue
                # Who was noticed first is the cause: the others end because of that.
                key = f"{self._run}/ended"
                first = self._store.compare_set(key, "", text)
            except (RuntimeError, OSError):
                # Rank 0 has ended, which keeps the store, maybe because of another:
                # nobody knows any more who was first.
                return self._text([one for one in gone if one in self._others])
            return first.decode(errors="replace")[:_TEXT_MAX] or text
        return ""

    def _text(self, gone: Sequence[int]) -> str:
        who = " and ".join(f"rank {rank} ({self._others[rank][0]})" for rank in gone)
        ended = "has ended while init() waited for it. Its own output"
        if len(gone) > 1:
            ended = "have ended while init() waited for them. Their own output"
        return (
            f"{who} {ended} says why; if it says nothing it was killed, perhaps for "
            "want of memory. Start all ranks again."
        )

    def _told(self) -> str:
        now = time.monotonic()
        if not self._elsewhere or now < self._ask_next:
            return ""
        self._ask_next = now + _ASK_S
        with contextlib.suppress(RuntimeError, OSError):
            key = f"{self._run}/ended"
            if self._store.check([key]):
                return self._store.get(key).decode(errors="replace")[:_TEXT_MAX]
        return ""
