# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A rank is killed while all meet in ``init()``: the others end with its name.

Processes without torchrun's agent, which would end the others itself. Their own time
is so long that who waits for it fails the test.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading

import pytest
from patience import PATIENCE_S
from ports import free_port

import torch_cpudist as cpudist
from torch_cpudist.launch import endpoints, separate_jobs
from torch_cpudist.launch.rendezvous import Rendezvous

pytestmark = pytest.mark.processes

RANKS = 3
# What is put into the store at a moment, or the call that connects a trainer.
CALLED, FIRST, MET, LISTENS = "ack/", "roster", "/start/", "/server/"
BEFORE_HELLO, BEHIND_HELLO = "before the hello", "behind the hello"
MEETS = "before it meets the servers of another job"


def hang_at(moment, here):
    """Has this process stop at a moment of ``init()``; it calls ``here`` there."""
    put, connect = Rendezvous.put, endpoints.connect
    if moment == MEETS:
        separate_jobs.meet = lambda *_: here()

    def putting(self, key, value):
        if moment in key:
            here()
        put(self, key, value)

    def connecting(*arguments, **named):
        if moment == BEFORE_HELLO:
            here()
        client = connect(*arguments, **named)
        if moment == BEHIND_HELLO:
            here()
        return client

    Rendezvous.put, endpoints.connect = putting, connecting


def run_rank(rank, port, variables, moment, pipe):
    def tell(kind, text=""):
        pipe.send_bytes(json.dumps([kind, text]).encode())

    def stay():
        tell("there")
        threading.Event().wait()  # to be killed

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **variables,
    )
    if moment:
        hang_at(moment, stay)
    try:
        cpudist.init(timeout_s=2 * PATIENCE_S)
        if cpudist.is_server():
            cpudist.serve()
        cpudist.shutdown()
        tell("end")
    except cpudist.Error as error:
        tell(type(error).__name__, str(error))


class Ranks:
    """Processes of one job; what they tell, by rank."""

    def __init__(self, servers=0, victim=-1, moment="", **variables):
        method = multiprocessing.get_context("forkserver")
        port = free_port()
        variables = variables or {"CPUDIST_SERVERS": str(servers)}
        self.processes, self._pipes = [], []
        for rank in range(RANKS):
            ours, theirs = method.Pipe(duplex=False)
            hangs = moment if rank == victim else ""
            process = method.Process(
                target=run_rank,
                args=(rank, port, variables, hangs, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def told(self, rank):
        assert self._pipes[rank].poll(PATIENCE_S), f"rank {rank} says nothing"
        return json.loads(self._pipes[rank].recv_bytes())

    def end(self):
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join(PATIENCE_S)
            pipe.close()


@pytest.fixture
def start():
    started = []

    def begin(*arguments, **named):
        started.append(Ranks(*arguments, **named))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.end()


@pytest.mark.parametrize(
    ("servers", "victim", "moment"),
    [
        (0, 1, CALLED),
        (0, 2, MET),
        (0, 1, LISTENS),
        (0, 1, BEFORE_HELLO),
        (0, 2, BEHIND_HELLO),
        (0, 0, FIRST),
        (0, 0, BEFORE_HELLO),
        (1, 0, MET),
        (1, 0, LISTENS),
        (1, 2, BEFORE_HELLO),
    ],
)
def test_the_others_end_with_the_name_of_who_was_killed(start, servers, victim, moment):
    ranks = start(servers, victim, moment)
    assert ranks.told(victim) == ["there", ""]
    os.kill(ranks.processes[victim].pid, signal.SIGKILL)
    for rank in range(RANKS):
        if rank == victim:
            continue
        kind, text = ranks.told(rank)
        if moment == FIRST:
            # Nobody has been told of the others yet; rank 0's store is gone.
            assert (kind, "rank 0 end" in text) == ("AddressError", True), text
            continue
        assert kind == "PeerLostError", text
        # A server that knew the trainer may say it first.
        names = f"rank {victim} (", f"trainer {victim} (", f"server {victim} ("
        assert any(name in text for name in names), text


def test_who_waits_for_servers_of_another_job_ends_with_that_name(start):
    """Somebody is there, and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        apart = {"CPUDIST_ROLE": "trainer", "CPUDIST_RENDEZVOUS": where}
        ranks = start(victim=1, moment=MEETS, **apart)
        assert ranks.told(1) == ["there", ""]
        waiting = [listener.accept()[0] for _ in range(RANKS - 1)]
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        for rank in (0, 2):
            kind, text = ranks.told(rank)
            assert (kind, "rank 1 (" in text) == ("PeerLostError", True), text
        for one in waiting:
            one.close()


def test_a_rank_that_is_through_may_end_at_once(start):
    """Its end is none that the others, which are not quite there, are to fear."""
    for servers in (0, 1):
        ranks = start(servers)
        assert [ranks.told(rank) for rank in range(RANKS)] == [["end", ""]] * RANKS
