# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Starts this rank's server and client, and makes them find the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_cpudist import _core
from torch_cpudist.errors import ConfigurationError, Error, FencedError
from torch_cpudist.launch import rank_network
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout, Numbers
from torch_cpudist.launch.meeting.point import MeetingPoint
from torch_cpudist.launch.refusals import RefusalLog
from torch_cpudist.launch.rendezvous import Rendezvous
from torch_cpudist.launch.rooms import ServerRoom
from torch_cpudist.launch.start_guard import StartGuard
from torch_cpudist.log import from_core, logger
from torch_cpudist.machine import host

_OWN_SERVER = "own"
_NO_KEY = (
    "servers listen on %s without a key: whoever reaches it can read and change the "
    "model. Set CPUDIST_SECRET_FILE on all processes (SECURITY.md)."
)
_PROBE_MS = 1000
# Ranks as threads: no wire to spare, and a frame that a test drops is missed at once.
THREADS_PROBE_MS = 20


def own_address(environment: Environment, layout: Layout) -> str:
    """The address that this rank's server listens on.

    Loopback when all ranks share a host, else the one that reaches ``MASTER_ADDR``; of
    servers that are launched apart, the one that reaches ``CPUDIST_RENDEZVOUS``.
    ``CPUDIST_BIND`` wins.

    Raises:
        ConfigurationError: no such address, or none that other hosts reach.
    """
    if environment.bind is not None:
        return host.bind_address(environment.bind)
    apart = environment.apart
    if apart is not None and apart.role == "server":
        if host.is_loopback(apart.host, apart.port):
            return host.LOOPBACK
        return host.address_towards(apart.host, apart.port)
    if layout.one_host:
        return host.LOOPBACK
    if environment.master_addr is None:
        raise ConfigurationError(
            "ranks run on several hosts and init() was given a store: set CPUDIST_BIND "
            "to the address of this host that the others reach."
        )
    return host.address_towards(environment.master_addr, environment.master_port)


@dataclass
class Endpoints:
    """This rank's ends of the links between trainers and servers.

    Attributes:
        server: of this rank; ``None`` on a trainer without one.
        client: of this rank; ``None`` on a dedicated server.
        ranks: of the links over a collective backend (``CPUDIST_TRANSPORT=c10d``).
        listening: addresses of the server.
        sockets: addresses of the sockets that this process may have open.
        keep: stores that other ranks may still read.
        meeting: where server 0 is met by trainers in jobs of their own.
        run_id: of the run, equal on all ranks of all its jobs.
        incarnation: how often this trainer was started in the run.
        rendezvous: where ranks met, for what they show each other later.
        refusals: who came to the server without the run's key.
    """

    server: _core.Server | None = None
    client: _core.Client | None = None
    ranks: _core.RankNetwork | None = None
    listening: list[str] = field(default_factory=list)
    sockets: set[str] = field(default_factory=set)
    keep: list[object] = field(default_factory=list)
    meeting: MeetingPoint | None = None
    run_id: int = 0
    incarnation: int = 1
    rendezvous: Rendezvous | None = None
    refusals: RefusalLog | None = None

    def note_listening(self, environment: Environment, layout: Layout) -> None:
        """The server listens: what must know of it does from now on."""
        self.sockets.update(self.listening)
        if self.server is not None and environment.secret is not None:
            shard = layout.servers.index(environment.rank)
            self.refusals = RefusalLog(self.server, f"server {shard}")

    def stop(self, reason: str) -> None:
        """Ends every wait and closes every link; who still waits is told the reason."""
        if self.rendezvous is not None:
            self.rendezvous.roll.end()
        # The server first: what it tells those who wait must arrive before the links
        # break.
        if self.server is not None:
            self.server.stop(reason)
        if self.client is not None:
            self.client.abort(reason)
        if self.ranks is not None:
            self.ranks.stop()
        if self.meeting is not None:
            self.meeting.stop()
        if self.refusals is not None:
            self.refusals.stop()  # last: it may be at a log that is slow


def _server_threads(environment: Environment, layout: Layout) -> int:
    ranks = layout.ranks_on_host_of(environment.rank)
    return environment.server.threads or max(1, host.cores() // ranks)


def _start_server(
    environment: Environment, layout: Layout, rendezvous: Rendezvous
) -> _core.Server:
    apart = environment.apart
    joins_s = rendezvous.remaining_s() if apart is None else apart.rejoin_s
    return _core.Server(
        run_id=rendezvous.run_id,
        shard_id=layout.servers.index(environment.rank),
        server_count=len(layout.servers),
        trainer_count=len(layout.trainers) if apart is None else apart.trainers,
        threads=_server_threads(environment, layout),
        liveness_ms=environment.liveness_ms,
        reconnect_grace_ms=environment.reconnect_ms,
        join_deadline_ms=max(1, int(joins_s * 1000)),
        elastic=apart is not None,
        rejoin_ms=0 if apart is None else apart.rejoin_s * 1000,
        memory_cap_bytes=environment.server.memory_cap_bytes,
        nonfinite=environment.server.nonfinite,
        host=host.description(),
        snapshot_dir=environment.snapshot_dir or "",
        snapshot_memory_bytes=environment.server.snapshot_memory_bytes,
        secret=environment.secret,
    )


def _listen(
    server: _core.Server,
    environment: Environment,
    layout: Layout,
    rendezvous: Rendezvous,
    network: _core.InprocNetwork | None,
    ranks: _core.RankNetwork | None,
) -> list[str]:
    """Listens where other ranks can reach this server, and tells them."""
    shard = layout.servers.index(environment.rank)
    try:
        if network is not None:
            name = f"{rendezvous.run_id}-{shard}"
            addresses = [server.listen_inproc(network, name)]
        elif ranks is not None:
            addresses = [server.listen_ranks(ranks)]
        else:
            bind = own_address(environment, layout)
            if environment.secret is None and not host.is_loopback(bind, 0):
                logger.warning(_NO_KEY, bind)
            addresses = server.listen_tcp(
                bind=bind,
                port_first=environment.ports[0],
                port_last=environment.ports[1],
                unix_socket=True,
                threads=_server_threads(environment, layout),
            )
    except Error as error:
        rendezvous.publish_failure(shard, str(error))
        raise
    rendezvous.publish(shard, addresses)
    logger.info("server %d listens on %s", shard, ", ".join(addresses))
    return addresses


def reachable(addresses: list[str], same_host: bool) -> list[str]:
    """Drops unix sockets of other hosts: an equal name there is another process."""
    return [a for a in addresses if same_host or not a.startswith("unix:")]


def _all_of(
    layout: Layout, rendezvous: Rendezvous, rank: int, own: str | None
) -> list[list[str]]:
    """The addresses of every server, by shard; of this rank's it is ``own``."""
    lists = rendezvous.addresses(layout.servers)
    for shard, server_rank in enumerate(layout.servers):
        same_host = layout.hosts[server_rank] == layout.hosts[rank]
        lists[shard] = reachable(lists[shard], same_host)
        if own and server_rank == rank:
            lists[shard] = [own]
    return lists


def start(
    environment: Environment,
    layout: Layout,
    rendezvous: Rendezvous,
    network: _core.InprocNetwork | None,
    transport: object | None = None,
) -> Endpoints:
    """Starts what this rank's role asks for and connects the client to every server.

    A rank reaches its own server inside the process; a world of one opens no socket.

    Args:
        environment: of this rank.
        layout: roles of all ranks.
        rendezvous: where ranks met; addresses go through it.
        network: in-process network that all ranks share (ranks as threads); ``None``
            uses sockets.
        transport: from ``rank_network.open_transport``, in the place of sockets.

    Raises:
        AddressError: a server cannot listen, or cannot be reached.
        OperationTimeoutError, PeerLostError: a server did not come.
    """
    made = Endpoints(run_id=rendezvous.run_id)
    rank = environment.rank
    alone = len(layout.hosts) == 1 and environment.apart is None
    links = network
    own: str | None = None
    try:
        if transport is not None:
            peers = rank_network.peers_of(layout, rank)
            made.ranks = _core.RankNetwork(transport, peers)
        if rank in layout.servers:
            if rank not in layout.trainers:
                ServerRoom(rendezvous, rank).tell()  # before trainers go on
            made.server = _start_server(environment, layout, rendezvous)
            if network is None and rank in layout.trainers:
                links = _core.InprocNetwork()
                own = made.server.listen_inproc(links, _OWN_SERVER)
            if network is not None or not alone:
                made.listening = _listen(
                    made.server,
                    environment,
                    layout,
                    rendezvous,
                    network=network,
                    ranks=made.ranks,
                )
                made.note_listening(environment, layout)
        if rank in layout.trainers:
            lists = [[own]] if own and alone else _all_of(layout, rendezvous, rank, own)
            made.sockets.update(address for some in lists for address in some)
            _connect_all(made, environment, layout, rendezvous, lists, links, network)
    except BaseException as error:
        made.stop(f"init() failed: {error}")
        raise
    return made


def _connect_all(
    made: Endpoints,
    environment: Environment,
    layout: Layout,
    rendezvous: Rendezvous,
    servers: list[list[str]],
    links: _core.InprocNetwork | None,
    network: _core.InprocNetwork | None,
) -> None:
    """Connects this rank's trainer to every server, and waits for all trainers."""
    limit_s = rendezvous.remaining_s()
    missing = "not all ranks have connected"
    with StartGuard(limit_s, missing, rendezvous.lost) as guard:
        made.client = connect(
            environment,
            layout.numbers_of(environment.rank),
            rendezvous.run_id,
            links,
            servers,
            connect_s=limit_s,
            probe_ms=_PROBE_MS if network is None else THREADS_PROBE_MS,
            ranks=made.ranks,
            guard=guard,
        )
        # Nobody goes on before all are connected: a rank that failed right away would
        # look to a slower one like a server that is still to come.
        made.client.barrier()
    rendezvous.roll.come_in()


def connect(
    environment: Environment,
    numbers: Numbers,
    run_id: int,
    network: _core.InprocNetwork | None,
    servers: list[list[str]],
    connect_s: float,
    incarnation: int = 1,
    probe_ms: int = _PROBE_MS,
    ranks: _core.RankNetwork | None = None,
    guard: StartGuard | None = None,
) -> _core.Client:
    """Makes a trainer's client and connects it to every server.

    Args:
        environment: of this rank.
        numbers: what this rank is.
        run_id: of the servers.
        network: where in-process addresses are looked up.
        servers: by shard, its addresses, best first.
        connect_s: longest wait for the servers, in seconds.
        incarnation: how often this trainer was started.
        probe_ms: how often a waiting request asks whether it arrived.
        ranks: links over a collective backend.
        guard: what is to end its waits.

    Raises:
        AddressError, PeerLostError: a server cannot be reached.
        FencedError: another process has this incarnation, or a later one.
    """
    client = _core.Client(
        run_id=run_id,
        trainer_rank=numbers.trainer_rank,
        trainer_count=numbers.trainer_count,
        servers=servers,
        network=network,
        ranks=ranks,
        incarnation=incarnation,
        liveness_ms=environment.liveness_ms,
        reconnect_grace_ms=environment.reconnect_ms,
        connect_deadline_ms=max(1, int(connect_s * 1000)),
        rpc_deadline_ms=environment.rpc_deadline_ms,
        rpc_retries=environment.rpc_retries,
        round_deadline_ms=environment.round_deadline_ms,
        # A probe's answer tells waiting for others from no answer: several of them must
        # fit before the request counts as unanswered.
        probe_ms=max(1, min(probe_ms, environment.rpc_deadline_ms // 4)),
        resend_ms=probe_ms,
        host=host.description(),
        logger=from_core,
        secret=environment.secret,
    )
    if guard is not None:
        guard.ends(client.abort)
    try:
        client.connect()
    except FencedError as error:
        error.incarnation = client.fenced_by()
        raise
    return client
