# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks find each other over a c10d store, and tell each other who they are.

Values are JSON text. A store may outlive a run (torchrun keeps its own over a restart,
notebooks call ``init()`` again), so nothing found in it is trusted to be of this run
until rank 0 has sent back what this rank just wrote: every rank writes a random nonce,
rank 0 collects all of them into a roster, ranks acknowledge a roster that holds their
own nonce, and rank 0 collects again when one of them changed.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_cpudist.errors import (
    AddressError,
    Error,
    OperationTimeoutError,
    ProtocolError,
)
from torch_cpudist.settings.words import Words

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PREFIX = "torch_cpudist"
RUN_ID_MAX = 2**64 - 1
_POLL_MIN_S = 0.002
_POLL_MAX_S = 0.05


def write(store: Store, key: str, value: str) -> None:
    """Writes a value; it is there for everybody when this returns.

    A ``TCPStore`` does not wait for what it sets, but answers one client's requests in
    their order. Without it a rank that was told by another way than the store that the
    value is there would look too early.
    """
    store.set(key, value)
    store.check([key])


def whole(what: str, value: object, least: int, most: int) -> int:
    """A number that was found in a store, which whoever reaches it can write to.

    Args:
        what: it is, for the message.
        value: that was found.
        least: that it may be.
        most: that it may be.

    Raises:
        ProtocolError: it is none of these.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        found = type(value).__name__
    elif least <= value <= most:
        return value
    else:
        found = str(value)[:40]
    raise ProtocolError(
        f"the run's store says that {what} is {found}: expected a whole number from "
        f"{least} to {most}. Somebody else writes to it: give the run one of its own "
        "(SECURITY.md)."
    )


class Meeting:
    """One meeting of all ranks in a store.

    Cost: each rank writes three small values and reads one; rank 0 reads two of each
    rank.

    Thread safety: one thread.

    Attributes:
        store: where ranks meet.
        rank: of this process.
        ranks: to meet.
        run_id: 63-bit number of this meeting, once ``meet`` has returned.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        words: Words | None = None,
    ) -> None:
        """Meets in ``store``.

        Args:
            store: any c10d store that all ranks reach.
            rank: of this process among ``world_size``.
            world_size: ranks to meet.
            timeout_s: longest time for everything from here on.
            words: sign what is written, where there is a key.
        """
        self.store = store
        self._words = words or Words()
        self.rank = rank
        self.ranks = range(world_size)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.run_id = 0

    def remaining_s(self) -> float:
        """Seconds left before the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    # -- the store ---------------------------------------------------------------------

    def ask(self, action: Callable[[], Any]) -> Any:
        """What ``action`` has of the store.

        Raises:
            AddressError: it failed.
            Error: who has ended with it, as ``lost_with_store`` says.
        """
        try:
            return action()
        except Error:
            raise
        except (RuntimeError, OSError) as error:
            lost = self.lost_with_store()
            if lost is not None:
                raise lost from error
            raise AddressError(
                f"rank {self.rank}: the rendezvous store failed ({error}). Did "
                "torchrun's agent or rank 0 end?"
            ) from error

    def put(self, key: str, value: Any) -> None:
        """Writes a value, which is there for all ranks when this returns.

        Raises:
            AddressError: the store does not answer.
        """
        name = f"{PREFIX}/{key}"
        word = self._words.sign(name, json.dumps(value))
        self.ask(lambda: write(self.store, name, word))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these were written."""
        names = [f"{PREFIX}/{key}" for key in keys]
        return bool(self.ask(lambda: self.store.check(names)))

    def get(self, key: str) -> Any:
        """Reads a value that was written.

        Raises:
            AuthenticationError: by nobody who has this rank's key.
        """
        name = f"{PREFIX}/{key}"
        raw = self.ask(lambda: self.store.get(name))
        return json.loads(self._words.read(name, raw))

    def lost(self) -> Error | None:
        """Why there is no use in waiting any more; here there always is."""
        return None

    def lost_with_store(self) -> Error | None:
        """Whose end it was that the store has failed; here nobody's that is known."""
        return None

    def called(
        self, run_id: int, told: Sequence[Mapping[str, Any]], certain: bool
    ) -> None:
        """Hears who is thought to have come, and who has; here it is all the same.

        Args:
            run_id: of this meeting, unless somebody else comes.
            told: what every rank has told about itself, in order of rank.
            certain: whether all of that is of this meeting.
        """

    def first_meeting(self) -> bool:
        """Whether nobody has met in this store before, as rank 0 says; not known."""
        return False

    def poll(self, ready: Callable[[], Any], missing: Callable[[], str]) -> Any:
        """Asks until ``ready`` gives something else than ``None``.

        Polling, because a store's own wait can neither be interrupted nor say who is
        missing.

        Raises:
            OperationTimeoutError: says what ``missing`` does.
            Error: what ``lost`` says.
        """
        pause_s = _POLL_MIN_S
        while True:
            lost = self.lost()
            # What somebody has said before its end counts.
            answer = ready()
            if answer is not None:
                return answer
            if lost is not None:
                raise lost
            if time.monotonic() >= self._deadline:
                raise OperationTimeoutError(
                    f"rank {self.rank}: init() waited {self._timeout_s:g} s; "
                    f"{missing()}. Look at the output of those ranks, or pass "
                    "init(timeout_s=...)."
                )
            time.sleep(pause_s)
            pause_s = min(_POLL_MAX_S, pause_s * 1.5)

    # -- meeting -----------------------------------------------------------------------

    def meet(self, own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Waits until every rank is there.

        Args:
            own: what this rank tells, of what JSON takes.

        Returns:
            What every rank told about itself, in order of rank.

        Raises:
            OperationTimeoutError: names the ranks that did not come.
            AddressError: the store does not answer.
            AuthenticationError: another rank has another key, or none.
            ProtocolError: it says what no rank has written.
        """
        nonce = secrets.token_hex(8)
        self.put(f"here/{self.rank}", {"nonce": nonce, "member": dict(own)})
        roster = self._lead() if self.rank == 0 else self._follow(nonce)
        self.run_id = whole("the run's id", roster["run_id"], 1, RUN_ID_MAX)
        members = [entry["member"] for entry in roster["ranks"]]
        self.called(self.run_id, members, certain=True)
        return members

    def _absent(self) -> str:
        absent = [rank for rank in self.ranks if not self.has([f"here/{rank}"])]
        return (
            f"ranks {absent} of {len(self.ranks)} did not come"
            if absent
            else ("ranks came, but not all of them stayed")
        )

    def _collect(self) -> list[Any] | None:
        keys = [f"here/{rank}" for rank in self.ranks]
        return [self.get(key) for key in keys] if self.has(keys) else None

    def _lead(self) -> dict[str, Any]:
        roster: dict[str, Any] = {"ranks": None, "first": self.first_meeting()}

        def settled() -> dict[str, Any] | None:
            present = self._collect()
            if present is None:
                return None
            if present != roster["ranks"]:
                roster["ranks"] = present
                roster["run_id"] = secrets.randbits(62) + 1
                self.put("roster", roster)
                self._call_roll(roster)
            return roster if not self._unacknowledged(roster["run_id"]) else None

        def missing() -> str:
            if roster["ranks"] is None:
                return self._absent()
            return f"ranks {self._unacknowledged(roster['run_id'])} did not come"

        self.poll(settled, missing)
        self.put("go", roster["run_id"])
        return roster

    def _call_roll(self, roster: Mapping[str, Any]) -> None:
        members = [entry["member"] for entry in roster["ranks"]]
        self.called(roster["run_id"], members, certain=bool(roster["first"]))

    def _unacknowledged(self, run_id: int) -> list[int]:
        others = self.ranks[1:]
        return [
            rank
            for rank in others
            if not self.has([f"ack/{rank}"]) or self.get(f"ack/{rank}") != run_id
        ]

    def _follow(self, nonce: str) -> dict[str, Any]:
        acknowledged = 0

        def settled() -> dict[str, Any] | None:
            nonlocal acknowledged
            if not self.has(["roster"]):
                return None
            roster: dict[str, Any] = self.get("roster")
            if len(roster["ranks"]) != len(self.ranks):
                return None
            if roster["ranks"][self.rank]["nonce"] != nonce:
                return None
            if roster["run_id"] != acknowledged:
                acknowledged = roster["run_id"]
                self.put(f"ack/{self.rank}", acknowledged)
                self._call_roll(roster)
            gone = self.has(["go"]) and self.get("go") == acknowledged
            return roster if gone else None

        return self.poll(settled, self._absent)  # type: ignore[no-any-return]
