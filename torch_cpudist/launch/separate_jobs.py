# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: the meeting of two kinds of jobs, from both of its sides.
"""Servers and trainers in torchrun jobs of their own, so that one outlives the other.

Server 0 keeps a meeting point at ``CPUDIST_RENDEZVOUS`` (``meeting``). It holds the
run: its id, the servers' addresses, the settings. Trainers take their ids there: a job
takes as many in a row as it has ranks, and a job that torchrun restarts finds its own
again, each rank as the next incarnation of its trainer. Trainers that outlive the
servers, or that servers have counted as lost, keep theirs (``comeback``).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch_cpudist import _core
from torch_cpudist.backends.meeting import whole
from torch_cpudist.errors import (
    AddressError,
    ConfigMismatchError,
    ConfigurationError,
    FencedError,
    OperationTimeoutError,
)
from torch_cpudist.launch import endpoints, environment
from torch_cpudist.launch.endpoints import Endpoints
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout, Numbers
from torch_cpudist.launch.meeting.board import Board, WordStore
from torch_cpudist.launch.meeting.frames import ANSWER_MAX_BYTES
from torch_cpudist.launch.meeting.point import MeetingPoint
from torch_cpudist.launch.meeting.run_word import RANKS_MAX, job_of, run_of
from torch_cpudist.launch.meeting.store import MeetingStore
from torch_cpudist.launch.rendezvous import Rendezvous
from torch_cpudist.launch.start_guard import StartGuard
from torch_cpudist.log import logger
from torch_cpudist.machine import host
from torch_cpudist.settings.jobs import SeparateJob
from torch_cpudist.settings.words import Words

_PAUSE_S = 0.1
# A rank that claimed its job's ids and died before it wrote them down.
_CLAIM_S = 10.0
# Of all that server 0 says at once, besides the run: what is around it.
_RUN_MAX_BYTES = ANSWER_MAX_BYTES // 2
_INCARNATION_MAX = 2**32 - 1
TOGETHER, AT_ONCE = "together", "at once"
_RUN = "run"


def start(
    made: Environment, apart: SeparateJob, layout: Layout, rendezvous: Rendezvous
) -> tuple[Numbers, Endpoints]:
    """Starts this rank's server, or its client to the servers of another job.

    Args:
        made: of this rank.
        apart: what it says of this rank's job.
        layout: of this rank's job.
        rendezvous: where its ranks met.

    Raises:
        AddressError: server 0 cannot listen at, or be reached at, the rendezvous.
        ConfigMismatchError: trainers and servers were started with other settings.
        OperationTimeoutError, PeerLostError: trainers or servers did not come.
    """
    if apart.role == "server":
        return _serve(made, apart, layout, rendezvous)
    return _train(made, apart, rendezvous)


def _settings(made: Environment) -> dict[str, str]:
    agreed = environment.agreed_settings(made)
    # Who serves is said by the role here, and how long to wait by the servers.
    return {k: v for k, v in agreed.items() if k != "CPUDIST_SERVERS"}


# -- servers


def _serve(
    made: Environment, apart: SeparateJob, layout: Layout, rendezvous: Rendezvous
) -> tuple[Numbers, Endpoints]:
    ends = endpoints.start(made, layout, rendezvous, None)
    numbers = replace(layout.numbers_of(made.rank), trainer_count=apart.trainers)
    try:
        addresses = rendezvous.addresses(layout.servers)
        if made.rank == 0:
            run = {
                "run_id": rendezvous.run_id,
                "trainers": apart.trainers,
                "servers": addresses,
                "hosts": list(layout.hosts),
                "settings": _settings(made),
            }
            word = Words(made.secret).sign(_RUN, json.dumps(run))
            ends.meeting = _open_point(made, apart, word)
    except BaseException as error:
        ends.stop(f"init() failed: {error}")
        raise
    return numbers, ends


def _open_point(made: Environment, apart: SeparateJob, word: str) -> MeetingPoint:
    """Listens where trainers meet; on that address only."""
    if len(word) > _RUN_MAX_BYTES:
        raise ConfigurationError(
            f"{len(word)} bytes to say of all servers, more than {_RUN_MAX_BYTES}: as "
            "many servers cannot be met."
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(
            apart.host, apart.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.create_server(
            (str(address[0]), apart.port), family=family, backlog=1024
        )
    except OSError as error:
        raise AddressError(
            f"server 0 cannot listen at {apart.where}: {error}. It must name an "
            "address of server 0's host and a free port; server 0 is rank 0 of the "
            "servers' torchrun job."
        ) from error
    board = Board({_RUN: word})
    point = MeetingPoint(listener, f"{apart.host}:{apart.port}", board, made.secret)
    logger.info("trainers are met at %s", apart.where)
    return point


# -- trainers


def _train(
    made: Environment, apart: SeparateJob, rendezvous: Rendezvous
) -> tuple[Numbers, Endpoints]:
    nobody = f"no servers were met at {apart.where}"
    with StartGuard(rendezvous.remaining_s(), nobody, rendezvous.lost) as guard:
        store, run = meet(made, apart, rendezvous.remaining_s, guard)
        words = words_of(made, run)
        rank, incarnation = claim(store, made, words, rendezvous.remaining_s())
    numbers = Numbers(
        role="trainer",
        trainer_rank=rank,
        trainer_count=int(run["trainers"]),
        server_count=len(run["servers"]),
        shard_id=-1,
    )
    missing = f"not all of CPUDIST_TRAINERS={numbers.trainer_count} trainers came"
    limit_s = rendezvous.remaining_s()
    with StartGuard(limit_s, missing, rendezvous.lost) as guard:
        guard.ends(store.end)
        while True:
            try:
                ends, client = connected(
                    made, numbers, run, incarnation, limit_s, guard
                )
                break
            except FencedError as error:
                incarnation = _outbid(store, made, incarnation, error)
            if rendezvous.remaining_s() <= 0:
                raise OperationTimeoutError(
                    f"somebody else took every number of trainer {rank}'s starts, up "
                    f"to {incarnation}, and may be no trainer of this run. With "
                    "CPUDIST_SECRET_FILE on all processes such are refused."
                )
        if incarnation > 1:
            logger.info("trainer %d is back, incarnation %d", rank, incarnation)
        if rank < numbers.trainer_count:
            begin(store, words, client, TOGETHER)
    rendezvous.roll.come_in()
    return numbers, ends


def _outbid(
    store: WordStore,
    made: Environment,
    incarnation: int,
    error: FencedError,
) -> int:
    """The next number for a process that starts and finds its own taken.

    By somebody whose start nobody has counted, as no start of this trainer's was.

    Raises:
        FencedError: this trainer was started again meanwhile.
    """
    name = f"started/{_job_of(made)}/{made.rank}"
    if store.add(name, 0) > incarnation:
        raise error
    logger.warning("%s. This process takes a later number.", str(error).rstrip("."))
    time.sleep(_PAUSE_S)  # for servers, whose bound grows with time
    more = max(error.incarnation - incarnation, 0) + 1
    counted = store.add(name, more)
    return whole("its incarnation", counted, 1, _INCARNATION_MAX)


def words_of(made: Environment, run: dict[str, Any]) -> Words:
    """What trainers write about a run, which is good for no other run."""
    return Words(made.secret, f"run {run['run_id']}")


def begin(store: WordStore, words: Words, client: _core.Client, how: str) -> None:
    """Meets the others, where the run has not started yet.

    Only at the start: who joins later waits for nobody. Whoever comes first says how
    it starts, for all: else one would wait at a barrier to which others do not come.

    Args:
        store: of the run.
        words: of the run.
        client: of this trainer.
        how: ``TOGETHER``, of one that begins; ``AT_ONCE``, of one that goes on.

    Raises:
        AddressError: the store failed.
        AuthenticationError: somebody without the key has written there.
        PeerLostError, OperationTimeoutError: trainers or servers did not come.
    """
    if store.check(["started"]):
        return
    first = _said_first(store, words, "start", how)
    if first == TOGETHER:
        client.barrier()
    store.set("started", "1")


def _said_first(store: WordStore, words: Words, name: str, text: str) -> str:
    """What stands under a name: ``text``, or what somebody has said before."""
    return words.read(name, store.compare_set(name, "", words.sign(name, text)))


def meet(
    made: Environment,
    apart: SeparateJob,
    remaining_s: Callable[[], float],
    guard: StartGuard | None = None,
) -> tuple[MeetingStore, dict[str, Any]]:
    """Waits until server 0 listens.

    Args:
        made: of this trainer.
        apart: what it says of its job.
        remaining_s: how much longer this, and what is asked of the store later, may
            take; asked again and again.
        guard: ends these waits, too.

    Returns:
        The words there, and what they say of the run.

    Raises:
        AddressError, OperationTimeoutError: nobody is met there.
        AuthenticationError: somebody without the key is there, or has written there.
        ConfigMismatchError: servers were started with other settings.
        ProtocolError: no meeting point is there, or no server has written the run.
        ClosedError: the guard has ended it.
    """
    store = MeetingStore(apart, made.secret, remaining_s)
    if guard is not None:
        guard.ends(store.end)
    found = store.get(_RUN)
    run = run_of(Words(made.secret).read(_RUN, found))
    _check_run(made, apart, run)
    return store, run


def connected(
    made: Environment,
    numbers: Numbers,
    run: dict[str, Any],
    incarnation: int,
    connect_s: float,
    guard: StartGuard | None = None,
) -> tuple[Endpoints, _core.Client]:
    """A trainer's end, and its client, connected to every server of a run.

    ``guard`` ends the client's waits.

    Raises:
        AddressError, PeerLostError: a server cannot be reached.
        FencedError: servers have met a later incarnation.
    """
    own = host.identity()
    lists = [
        endpoints.reachable(addresses, host_id == own)
        for addresses, host_id in zip(run["servers"], run["hosts"], strict=True)
    ]
    run_id = int(run["run_id"])
    client = endpoints.connect(
        made,
        numbers,
        run_id,
        None,
        lists,
        connect_s=connect_s,
        incarnation=incarnation,
        guard=guard,
    )
    ends = Endpoints(
        client=client,
        sockets={address for some in lists for address in some},
        run_id=run_id,
        incarnation=incarnation,
    )
    return ends, client


def _check_run(made: Environment, apart: SeparateJob, run: dict[str, Any]) -> None:
    mine = _settings(made)
    if apart.trainers:
        mine["CPUDIST_TRAINERS"] = str(apart.trainers)
        run["settings"]["CPUDIST_TRAINERS"] = str(run["trainers"])
    for name in sorted(mine.keys() | run["settings"].keys()):
        ours = mine.get(name, "(unset)")
        theirs = run["settings"].get(name, "(unset)")
        if ours != theirs:
            raise ConfigMismatchError(
                f"{name}: {ours} on this trainer, {theirs} on the servers at "
                f"{apart.where}. Set it to the same value in both jobs."
            )


def _job_of(made: Environment) -> str:
    job = made.job or str(os.getpid())
    if made.master_addr is None or host.is_loopback(made.master_addr, made.master_port):
        # A name of this host only: other hosts may have a job of the same name.
        job = f"{host.identity()}/{job}"
    return job


def claim(
    store: WordStore, made: Environment, words: Words, limit_s: float = _CLAIM_S
) -> tuple[int, int]:
    """This rank's trainer id, and how often it was started.

    Args:
        store: of the run.
        made: of this rank.
        words: of the run.
        limit_s: how long it may wait for another rank of its job.

    Raises:
        AuthenticationError: somebody without the key has written there.
        ConfigurationError: its job has more ranks than when it came first.
        ProtocolError: numbers there that no trainer has written.
    """
    job = _job_of(made)
    incarnation = store.add(f"started/{job}/{made.rank}", 1)
    base = f"base/{job}"
    if store.add(f"claim/{job}", 1) > 1:
        until = time.monotonic() + min(limit_s, _CLAIM_S)
        while not store.check([base]) and time.monotonic() < until:
            time.sleep(_PAUSE_S / 10)
    if not store.check([base]):
        first = _free_ids(store, words, job, made.world_size)
        # Somebody else may have been as patient: one of the two stands.
        _said_first(store, words, base, json.dumps([first, made.world_size]))
    first, ranks = job_of(words.read(base, store.get(base)))
    if made.world_size > ranks:
        raise ConfigurationError(
            f"the torchrun job {job!r} came with {ranks} ranks at first and has "
            f"{made.world_size} now; their trainer ids are in a row, and others have "
            "the next ones. Start the larger job under another --rdzv-id."
        )
    return (
        whole("this trainer's id", first + made.rank, 0, RANKS_MAX),
        whole("its incarnation", incarnation, 1, _INCARNATION_MAX),
    )


def _free_ids(store: WordStore, words: Words, job: str, ranks: int) -> int:
    """The first of the next ids in a row that nobody has kept over servers' end."""
    while True:
        first = store.add("trainers", ranks) - ranks
        if all(_owns(store, words, job, first + one) for one in range(ranks)):
            return first


def _owns(store: WordStore, words: Words, job: str, rank: int) -> bool:
    return _said_first(store, words, f"owner/{rank}", job) == job


def keep_id(store: WordStore, made: Environment, words: Words, rank: int) -> int:
    """Takes the id that this trainer had with servers that were lost.

    Args:
        store: of those that came in their place.
        made: of this trainer.
        words: of the run.
        rank: its id.

    Returns:
        Its incarnation there.

    Raises:
        ConfigMismatchError: another job was faster.
    """
    job, first = _job_of(made), rank - made.rank
    # Those of the whole job: its other ranks may be slower than a new job.
    ids = range(first, first + made.world_size)
    if not all(_owns(store, words, job, one) for one in ids):
        raise ConfigMismatchError(
            f"trainer {rank}: a job that was started while the servers were away has "
            "taken this id, or one of this job. Start this job again: it gets others."
        )
    _said_first(store, words, f"base/{job}", json.dumps([first, made.world_size]))
    incarnation = store.add(f"started/{job}/{made.rank}", 1)
    return whole("its incarnation", incarnation, 1, _INCARNATION_MAX)


def next_incarnation(
    store: WordStore, made: Environment, last: int, unanswered: int
) -> int:
    """The next incarnation of a trainer that its servers have counted as lost.

    They are issued by the store's count of this rank's starts, also to a process that
    was started in this one's place.

    Args:
        store: of the run.
        made: of this trainer.
        last: that it had, or was issued last.
        unanswered: how often it has asked since and heard nothing: each time a number
            may have been issued all the same.

    Raises:
        FencedError: such a process has come.
        ProtocolError: a number there that no trainer has written.
    """
    number = store.add(f"started/{_job_of(made)}/{made.rank}", 1)
    incarnation = whole("its incarnation", number, 1, _INCARNATION_MAX)
    if not last < incarnation <= last + 1 + unanswered:
        raise FencedError(
            f"this trainer was counted as lost as incarnation {last}, and "
            f"incarnation {incarnation - 1} was started since. Two processes cannot "
            "be one trainer: this one ends."
        )
    return incarnation
