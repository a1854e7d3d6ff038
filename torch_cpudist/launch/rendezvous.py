# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The meeting of a run's ranks: members, run id, servers' addresses."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from torch_cpudist.backends.meeting import PREFIX, Meeting
from torch_cpudist.errors import (
    AddressError,
    ConfigurationError,
    Error,
    describe,
)
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Member
from torch_cpudist.launch.roll_call import RollCall
from torch_cpudist.log import logger
from torch_cpudist.machine import host
from torch_cpudist.settings.words import Words

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_RETRY_S = 0.05
_CONNECT_S = 5.0


def open_store(environment: Environment, timeout_s: float) -> Store:
    """Connects to the store at ``MASTER_ADDR:MASTER_PORT``: torchrun's or rank 0's.

    Without torchrun's agent rank 0 keeps it, and listens on the address that
    ``MASTER_ADDR`` names there, on no other.

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
            if hosts:
                return _keep_store(environment, timeout_s)
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
            return _store(address, port, timeout_s)
        except (RuntimeError, ValueError, OSError) as error:
            if hosts or time.monotonic() >= deadline:
                raise AddressError(
                    f"no rendezvous store at {where} within {timeout_s:g} s: {error}. "
                    "Start every rank with torchrun and the same --rdzv-endpoint."
                ) from error
        time.sleep(_RETRY_S)


def _store(address: str, port: int, timeout_s: float, **others: Any) -> Store:
    # Its own wait for the other ranks could not be interrupted.
    return TCPStore(
        address,
        port,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        **({"is_master": False} | others),
    )


def _keep_store(environment: Environment, timeout_s: float) -> Store:
    """The store of rank 0: one that this process keeps at that port already, or new."""
    address, port = environment.master_addr or "", environment.master_port
    listener = _listener(environment)
    if listener is None:
        return _store(address, port, timeout_s, is_master=True, multi_tenant=True)
    at = str(listener.getsockname()[0])
    # The store's from here on, also where it fails: it may have closed it by then, and
    # the number may be another thread's.
    descriptor = listener.detach()
    return _store(
        at,
        port,
        timeout_s,
        is_master=True,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def _is_local(name: str) -> bool:
    """Whether a name or address is of every host itself, for all that use it."""
    return name in ("localhost", "::1") or name.startswith("127.")


def _listener(environment: Environment) -> socket.socket | None:
    """A socket that listens where ``MASTER_ADDR`` leads.

    Returns:
        ``None`` where the port is taken, perhaps by a store of this process; or where
        only a socket on all addresses is sure to be reached.

    Raises:
        OSError: this host cannot listen there.
    """
    name, port = environment.master_addr or "", environment.master_port
    several = environment.local_world_size < environment.world_size
    if not environment.local_said and not _is_local(name):
        several = environment.world_size > 1  # some hosts' own names lead to loopback
    why = "is a name of this host only, though ranks may run on several"
    if not (several and host.is_loopback(name, port)):
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        # Of a name with both kinds of address IPv4's is the one that all hosts have.
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        for family, *_, address in found:
            try:
                return socket.create_server(address, family=family, backlog=1024)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return None
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        why = "is no address of this host, on which rank 0 runs"
    logger.warning(
        "MASTER_ADDR=%s %s: the rendezvous store listens on every interface. Set it to "
        "the address of rank 0's host that the others reach.",
        name,
        why,
    )
    return None


class Rendezvous(Meeting):
    """The meeting of all ranks of a torchrun job, and what they show each other later.

    Thread safety: one thread; ``lost`` any.

    Attributes:
        roll: of the ranks, until ``init()`` is done with all of them.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        words: Words | None = None,
    ) -> None:
        """Meets in ``store``; see ``Meeting``."""
        super().__init__(store, rank, world_size, timeout_s, words)
        self.roll = RollCall(store, rank)

    def lost(self) -> Error | None:
        """The error of a rank that has ended while others wait for it."""
        return self.roll.look()

    def lost_with_store(self) -> Error | None:
        """The same of rank 0, if it was with its end that the store has failed."""
        return self.roll.after_failure()

    def called(
        self, run_id: int, told: Sequence[Mapping[str, Any]], certain: bool
    ) -> None:
        """Watches those that have come."""
        self.roll.begin(run_id, [Member(**one) for one in told], certain)

    def first_meeting(self) -> bool:
        """Whether nobody has met in this store before."""
        count = self.ask(lambda: self.store.add(f"{PREFIX}/meetings", 1))
        return bool(count == 1)

    def meet_members(self, own: Member) -> list[Member]:
        """Waits until every rank is there; see ``meet``."""
        return [Member(**told) for told in self.meet(asdict(own))]

    def start_together(self, check: Callable[[], None]) -> None:
        """Goes on when every rank can.

        Args:
            check: raises if this rank cannot; the others are told why.

        Raises:
            ConfigurationError: another rank cannot.
            OperationTimeoutError: names the ranks that did not say.
        """
        refused = f"{self.run_id}/refused"
        keys = [f"{self.run_id}/start/{rank}" for rank in self.ranks]
        try:
            check()
        except Error as error:
            why = f"rank {self.rank} cannot take part: {describe(error)}"
            self.put(refused, why)
            raise
        self.put(keys[self.rank], True)

        def settled() -> bool | None:
            if self.has(keys):
                return True
            if self.has([refused]):
                raise ConfigurationError(self.get(refused))
            return None

        def missing() -> str:
            absent = [rank for rank in self.ranks if not self.has([keys[rank]])]
            return f"ranks {absent} did not start"

        self.poll(settled, missing)

    def publish(self, shard: int, addresses: list[str]) -> None:
        """Tells where a server listens."""
        self.put(f"{self.run_id}/server/{shard}", {"addresses": addresses})

    def publish_failure(self, shard: int, reason: str) -> None:
        """Tells why a server does not listen, so that the others stop waiting."""
        self.put(f"{self.run_id}/server/{shard}", {"failed": reason})

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
                if not self.has([keys[shard]]):
                    return None
                entry = self.get(keys[shard])
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

        self.poll(settled, missing)
        return [found[shard] for shard in keys]

    def show(self, key: str, value: Any) -> None:
        """Leaves something for ranks that look for it, once in a run.

        Raises:
            AddressError: the store does not answer.
        """
        self.put(f"{self.run_id}/shown/{key}", value)

    def shown(self, key: str) -> Any:
        """What a rank has left under ``key``, else ``None``; does not wait for it.

        Raises:
            AddressError: the store does not answer.
        """
        name = f"{self.run_id}/shown/{key}"
        return self.get(name) if self.has([name]) else None

    def group_store(self, name: str = "group") -> Store:
        """A store of its own for a process group; without a name the trainers'."""
        return PrefixStore(f"{PREFIX}/{self.run_id}/{name}", self.store)
