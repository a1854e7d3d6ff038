# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks find each other over a c10d store: members, run id, servers' addresses.

Values are JSON text. A store may outlive a run (torchrun keeps its own over a restart,
notebooks call ``init()`` again), so nothing found in it is trusted to be of this run
until rank 0 has sent back what this rank just wrote: every rank writes a random nonce,
rank 0 collects all of them into a roster, ranks acknowledge a roster that holds their
own nonce, and rank 0 collects again when one of them changed.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from torch_cpudist.errors import (
    AddressError,
    ConfigurationError,
    Error,
    OperationTimeoutError,
    describe,
)
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Member

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PREFIX = "torch_cpudist"
_POLL_MIN_S = 0.002
_POLL_MAX_S = 0.05
_CONNECT_S = 5.0


def open_store(environment: Environment, timeout_s: float) -> Store:
    """Connects to the store at ``MASTER_ADDR:MASTER_PORT``: torchrun's or rank 0's.

    Raises:
        AddressError: the name does not resolve, or nobody answers there in time.
    """
    address = environment.master_addr or ""
    port = environment.master_port
    where = f"MASTER_ADDR={address} MASTER_PORT={port}"
    try:
        # The store itself would look a wrong name up again until the time is over.
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(
            f"{where}: the name does not resolve on this host ({error}). Give torchrun "
            "an --rdzv-endpoint or --master-addr that every host resolves."
        ) from error
    # torchrun's agent keeps the store; without an agent rank 0 does.
    hosts = environment.rank == 0 and not environment.agent_store
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if not hosts:
                socket.create_connection((address, port), timeout=_CONNECT_S).close()
            # Its own wait for the other ranks could not be interrupted.
            return TCPStore(
                address,
                port,
                is_master=hosts,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError, OSError) as error:
            if hosts or time.monotonic() >= deadline:
                raise AddressError(
                    f"no rendezvous store at {where} within {timeout_s:g} s: {error}. "
                    "Start every rank with torchrun and the same --rdzv-endpoint."
                ) from error
        time.sleep(_POLL_MAX_S)


class Rendezvous:
    """One meeting of all ranks in a store.

    Cost: each rank writes three small values and reads one; rank 0 reads two of each
    rank.

    Thread safety: one thread.

    Attributes:
        run_id: 63-bit number of this run, once ``meet`` has returned.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Meets in ``store``.

        Args:
            store: any c10d store that all ranks reach.
            rank: of this process among ``world_size``.
            world_size: ranks to meet.
            timeout_s: longest time for everything from here on.
        """
        self._store = store
        self._rank = rank
        self._ranks = range(world_size)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self.run_id = 0

    def remaining_s(self) -> float:
        """Seconds left before the deadline, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    # -- the store
    # ---------------------------------------------------------------------------

    def _call(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Error:
            raise
        except (RuntimeError, OSError) as error:
            raise AddressError(
                f"rank {self._rank}: the rendezvous store failed ({error}). Did "
                "torchrun's agent "
                "or rank 0 end?"
            ) from error

    def _set(self, key: str, value: Any) -> None:
        self._call(lambda: self._store.set(f"{_PREFIX}/{key}", json.dumps(value)))

    def _has(self, keys: Sequence[str]) -> bool:
        names = [f"{_PREFIX}/{key}" for key in keys]
        return bool(self._call(lambda: self._store.check(names)))

    def _get(self, key: str) -> Any:
        raw = self._call(lambda: self._store.get(f"{_PREFIX}/{key}"))
        return json.loads(raw)

    def _poll(self, ready: Callable[[], Any], missing: Callable[[], str]) -> Any:
        """Asks until ``ready`` gives something else than ``None``.

        Polling, because a store's own wait can neither be interrupted nor say who is
        missing.
        """
        pause_s = _POLL_MIN_S
        while True:
            answer = ready()
            if answer is not None:
                return answer
            if time.monotonic() >= self._deadline:
                raise OperationTimeoutError(
                    f"rank {self._rank}: init() waited {self._timeout_s:g} s; "
                    f"{missing()}. "
                    "Look at the output of those ranks, or pass init(timeout_s=...)."
                )
            time.sleep(pause_s)
            pause_s = min(_POLL_MAX_S, pause_s * 1.5)

    # -- meeting
    # -----------------------------------------------------------------------------

    def meet(self, own: Member) -> list[Member]:
        """Waits until every rank is there.

        Returns:
            What every rank told about itself, in order of rank.

        Raises:
            OperationTimeoutError: names the ranks that did not come.
            AddressError: the store does not answer.
        """
        nonce = secrets.token_hex(8)
        self._set(f"here/{self._rank}", {"nonce": nonce, "member": asdict(own)})
        roster = self._lead() if self._rank == 0 else self._follow(nonce)
        self.run_id = int(roster["run_id"])
        return [Member(**entry["member"]) for entry in roster["ranks"]]

    def _absent(self) -> str:
        absent = [rank for rank in self._ranks if not self._has([f"here/{rank}"])]
        return (
            f"ranks {absent} of {len(self._ranks)} did not come"
            if absent
            else ("ranks came, but not all of them stayed")
        )

    def _collect(self) -> list[Any] | None:
        keys = [f"here/{rank}" for rank in self._ranks]
        return [self._get(key) for key in keys] if self._has(keys) else None

    def _lead(self) -> dict[str, Any]:
        roster: dict[str, Any] = {"ranks": None}

        def settled() -> dict[str, Any] | None:
            present = self._collect()
            if present is None:
                return None
            if present != roster["ranks"]:
                roster["ranks"] = present
                roster["run_id"] = secrets.randbits(62) + 1
                self._set("roster", roster)
            return roster if not self._unacknowledged(roster["run_id"]) else None

        def missing() -> str:
            if roster["ranks"] is None:
                return self._absent()
            return f"ranks {self._unacknowledged(roster['run_id'])} did not come"

        self._poll(settled, missing)
        self._set("go", roster["run_id"])
        return roster

    def _unacknowledged(self, run_id: int) -> list[int]:
        others = self._ranks[1:]
        return [
            rank
            for rank in others
            if not self._has([f"ack/{rank}"]) or self._get(f"ack/{rank}") != run_id
        ]

    def _follow(self, nonce: str) -> dict[str, Any]:
        acknowledged = 0

        def settled() -> dict[str, Any] | None:
            nonlocal acknowledged
            if not self._has(["roster"]):
                return None
            roster: dict[str, Any] = self._get("roster")
            if len(roster["ranks"]) != len(self._ranks):
                return None
            if roster["ranks"][self._rank]["nonce"] != nonce:
                return None
            if roster["run_id"] != acknowledged:
                acknowledged = roster["run_id"]
                self._set(f"ack/{self._rank}", acknowledged)
            gone = self._has(["go"]) and self._get("go") == acknowledged
            return roster if gone else None

        return self._poll(settled, self._absent)  # type: ignore[no-any-return]

    # -- after the meeting
    # -------------------------------------------------------------------

    def start_together(self, check: Callable[[], None]) -> None:
        """Goes on when every rank can.

        Args:
            check: raises if this rank cannot; the others are told why.

        Raises:
            ConfigurationError: another rank cannot.
            OperationTimeoutError: names the ranks that did not say.
        """
        refused = f"{self.run_id}/refused"
        keys = [f"{self.run_id}/start/{rank}" for rank in self._ranks]
        try:
            check()
        except Error as error:
            why = f"rank {self._rank} cannot take part: {describe(error)}"
            self._set(refused, why)
            raise
        self._set(keys[self._rank], True)

        def settled() -> bool | None:
            if self._has(keys):
                return True
            if self._has([refused]):
                raise ConfigurationError(self._get(refused))
            return None

        def missing() -> str:
            absent = [rank for rank in self._ranks if not self._has([keys[rank]])]
            return f"ranks {absent} did not start"

        self._poll(settled, missing)

    def publish(self, shard: int, addresses: list[str]) -> None:
        """Tells where a server listens."""
        self._set(f"{self.run_id}/server/{shard}", {"addresses": addresses})

    def publish_failure(self, shard: int, reason: str) -> None:
        """Tells why a server does not listen, so that the others stop waiting."""
        self._set(f"{self.run_id}/server/{shard}", {"failed": reason})

    def addresses(self, servers: Sequence[int]) -> list[list[str]]:
        """Waits for the addresses of every server.

        Args:
            servers: ranks by shard id.

        Raises:
            AddressError: a server could not listen.
            OperationTimeoutError: names the servers that did not publish in time.
        """
        keys = {shard: f"{self.run_id}/server/{shard}" for shard in range(len(servers))}
        found: dict[int, list[str]] = {}

        def settled() -> bool | None:
            for shard in [s for s in keys if s not in found]:
                if not self._has([keys[shard]]):
                    return None
                entry = self._get(keys[shard])
                if "failed" in entry:
                    raise AddressError(
                        f"server {shard} (rank {servers[shard]}) cannot listen: "
                        f"{entry['failed']}"
                    )
                found[shard] = entry["addresses"]
            return True

        def missing() -> str:
            absent = [f"server {s} (rank {servers[s]})" for s in keys if s not in found]
            return f"no address of {', '.join(absent)}"

        self._poll(settled, missing)
        return [found[shard] for shard in keys]

    def show(self, key: str, value: Any) -> None:
        """Leaves something for ranks that look for it, once in a run.

        Raises:
            AddressError: the store does not answer.
        """
        self._set(f"{self.run_id}/shown/{key}", value)

    def shown(self, key: str) -> Any:
        """What a rank has left under ``key``, else ``None``; does not wait for it.

        Raises:
            AddressError: the store does not answer.
        """
        name = f"{self.run_id}/shown/{key}"
        return self._get(name) if self._has([name]) else None

    def group_store(self, name: str = "group") -> Store:
        """A store of its own for a process group; without a name the trainers'."""
        return PrefixStore(f"{_PREFIX}/{self.run_id}/{name}", self._store)
