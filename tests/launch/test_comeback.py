# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ids of trainers that outlive the store, and what a wait for servers refuses."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from patience import PATIENCE_S
from torch._C._distributed_c10d import TCPStore

import torch_cpudist as cpudist
from torch_cpudist.launch import environment, separate_jobs
from torch_cpudist.launch.comeback import Comeback
from torch_cpudist.launch.endpoints import Endpoints
from torch_cpudist.launch.layout import Numbers
from torch_cpudist.machine import host

AWAY = {
    "CPUDIST_ROLE": "trainer",
    "CPUDIST_RENDEZVOUS": "127.0.0.1:29600",
    "CPUDIST_REJOIN_S": "60",
}


@pytest.fixture
def store():
    return TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=PATIENCE_S),
    )


def job(name, ranks=1, rank=0, **others):
    variables = {"TORCHELASTIC_RUN_ID": name, "WORLD_SIZE": str(ranks)}
    variables |= {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    variables |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    return environment.parse(AWAY | variables | others)


def test_trainers_keep_their_ids_and_others_take_those_that_are_free(store):
    """Whoever comes first: ids of those that are away are not given twice."""
    kept = job("two", 2, 1)
    assert separate_jobs.keep_id(store, kept, 2) == 1
    assert separate_jobs.claim(store, job("new")) == (0, 1)
    assert separate_jobs.claim(store, job("two", 2, 0)) == (1, 1)
    assert separate_jobs.claim(store, job("later")) == (3, 1)
    # They are the next incarnations when they are started again.
    assert separate_jobs.claim(store, kept) == (2, 2)
    assert separate_jobs.keep_id(store, kept, 2) == 3


def test_who_was_slower_than_a_new_job_is_told(store):
    assert separate_jobs.claim(store, job("new")) == (0, 1)
    with pytest.raises(cpudist.ConfigMismatchError, match="Start this job again"):
        separate_jobs.keep_id(store, job("old"), 0)
    assert separate_jobs.claim(store, job("old")) == (1, 1)


@pytest.mark.parametrize(("role", "waits"), [("server", 600), ("trainer", 0)])
def test_without_the_variable_servers_wait_and_trainers_do_not(role, waits):
    variables = {"CPUDIST_ROLE": role, "CPUDIST_RENDEZVOUS": "localhost:29600"}
    made = environment.parse(variables | {"CPUDIST_TRAINERS": "1"})
    assert made.apart.rejoin_s == waits


class Client:
    """One whose servers are lost."""

    barriers = 0

    def abort(self, reason):
        self.reason = reason

    def barrier(self):
        self.barriers += 1


class Fails:
    """What takes part, and has no values for the servers that come."""

    def cannot_outlive(self, index):
        return ""

    def let_go(self):
        pass

    def go_on_with(self, client, limit_s):
        raise cpudist.SnapshotError("there is no snapshot")


class Noted:
    """What takes part, and cannot go on for a reason, or says that it was asked to."""

    def __init__(self, why=""):
        self.why = why
        self.let = 0

    def cannot_outlive(self, index):
        return f"{self.why} {index}" if self.why else ""

    def let_go(self):
        self.let += 1

    def go_on_with(self, client, limit_s):
        raise AssertionError("no servers have come")


def comeback(parts, closed=lambda: False, **others):
    ends = Endpoints(client=Client(), run_id=7)
    numbers = Numbers("trainer", 0, 1, 1, -1)
    made = job("a", **others)
    return ends, Comeback(made, numbers, lambda: ends, lambda: parts, closed)


def test_what_cannot_go_on_is_named_and_nothing_is_given_up():
    parts = [Noted(), Noted("it ends")]
    ends, one = comeback(parts)
    lost = cpudist.PeerLostError("server 0 was lost.")
    for _ in range(2):
        with pytest.raises(cpudist.PeerLostError, match=r"was lost\. .*: it ends 1$"):
            one.outlive(lost, ends.client)
    assert [part.let for part in parts] == [0, 0]


@pytest.mark.parametrize(
    "error", [cpudist.PeerLostError("lost"), cpudist.ClosedError("closed")]
)
def test_what_is_not_to_be_waited_for_is_raised(error):
    waits = "0" if isinstance(error, cpudist.PeerLostError) else "60"
    ends, one = comeback([Noted()], CPUDIST_REJOIN_S=waits)
    with pytest.raises(type(error)) as raised:
        one.outlive(error, ends.client)
    assert raised.value is error


def test_a_call_on_a_client_that_was_replaced_is_made_again():
    _, one = comeback([Noted()])
    one.outlive(cpudist.PeerLostError("lost"), Client())
    one.outlive(cpudist.ClosedError("aborted"), None)


def test_a_wait_in_vain_is_raised_again_by_later_calls(free_port_of_nobody):
    where = {"CPUDIST_RENDEZVOUS": free_port_of_nobody, "CPUDIST_REJOIN_S": "1"}
    part = Noted()
    ends, one = comeback([part], **where)
    lost = cpudist.PeerLostError("server 0 was lost")
    with pytest.raises(cpudist.PeerLostError, match="within 1 s") as first:
        one.outlive(lost, ends.client)
    assert "nobody answers at" in str(first.value)
    with pytest.raises(cpudist.PeerLostError) as again:
        one.outlive(lost, ends.client)
    assert again.value is first.value
    assert (part.let, ends.client.reason) == (1, "its servers were lost")


def answers(monkeypatch, store, run_id, connected=None):
    """Servers of this run are met."""
    run = {"run_id": run_id, "servers": [[]], "trainers": 1}
    monkeypatch.setattr(separate_jobs, "meet", lambda *_: (store, run))
    monkeypatch.setattr(separate_jobs, "connected", connected)


def test_servers_that_have_lost_this_trainer_are_not_said_to_be_away(
    store, monkeypatch
):
    answers(monkeypatch, store, 7)
    ends, one = comeback([Noted()], CPUDIST_REJOIN_S="1")
    with pytest.raises(cpudist.PeerLostError, match="within 1 s") as raised:
        one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)
    told = str(raised.value)
    assert "still answers at CPUDIST_RENDEZVOUS=127.0.0.1:29600" in told
    assert "start this job again: it joins them" in told
    assert "Start the servers' job" not in told


def test_the_end_of_a_run_ends_a_wait_for_servers(free_port_of_nobody):
    where = {"CPUDIST_RENDEZVOUS": free_port_of_nobody}
    waits = {"CPUDIST_REJOIN_S": str(int(PATIENCE_S))}
    part = Noted()
    ends, one = comeback([part], lambda: part.let > 0, **where, **waits)
    with pytest.raises(cpudist.ClosedError, match="has ended its run while it waited"):
        one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)


def test_a_run_that_ends_while_servers_come_keeps_no_client(store, monkeypatch):
    closed, came = [], Client()

    def connected(*_):
        closed.append(True)
        return Endpoints(client=came, run_id=8), came

    answers(monkeypatch, store, 8, connected)
    ends, one = comeback([Noted()], lambda: bool(closed))
    with pytest.raises(cpudist.ClosedError, match="has ended its run"):
        one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)
    assert "has ended its run" in came.reason


def test_who_cannot_go_on_stays_out_of_the_servers_that_came(store, monkeypatch):
    came = Client()
    answers(monkeypatch, store, 8, lambda *_: (Endpoints(client=came, run_id=8), came))
    ends, one = comeback([Fails()])
    one.check()
    lost = cpudist.PeerLostError("server 0 was lost")
    with pytest.raises(cpudist.SnapshotError) as first:
        one.outlive(lost, ends.client)
    assert ends.client is came
    assert "there is no snapshot" in came.reason
    for ask in (one.check, lambda: one.outlive(lost, came)):
        with pytest.raises(cpudist.SnapshotError) as again:
            ask()
        assert again.value is first.value


class GoesOn:
    """What takes part, and goes on with whoever comes."""

    def __init__(self):
        self.clients = []

    def cannot_outlive(self, index):
        return ""

    def let_go(self):
        pass

    def go_on_with(self, client, limit_s):
        self.clients.append(client)


def test_a_stranger_where_servers_are_to_come_ends_no_wait(store, monkeypatch):
    came, tries = Client(), []

    def connected(*_):
        tries.append(None)
        if len(tries) < 3:
            raise cpudist.AuthenticationError("server 0 at tcp:127.0.0.1:1: wrong key")
        return Endpoints(client=came, run_id=8), came

    answers(monkeypatch, store, 8, connected)
    part = GoesOn()
    ends, one = comeback([part])
    one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)
    assert part.clients == [came]
    assert ends.client is came


def test_a_stranger_who_stays_is_named_at_the_end(store, monkeypatch):
    def connected(*_):
        raise cpudist.AuthenticationError("server 0 at tcp:127.0.0.1:1: wrong key")

    answers(monkeypatch, store, 8, connected)
    ends, one = comeback([GoesOn()], CPUDIST_REJOIN_S="1")
    with pytest.raises(cpudist.PeerLostError, match=r"within 1 s .*wrong key"):
        one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)


@pytest.mark.parametrize(
    ("name", "value"),
    [("run_id", -1), ("run_id", 2**64), ("run_id", "1"), ("run_id", True),
     ("trainers", 0), ("trainers", 2**16), ("trainers", None)],
)  # fmt: skip
def test_numbers_that_no_server_has_written_are_refused(store, name, value):
    run = {"run_id": 7, "servers": [[]], "trainers": 1, "settings": {}} | {name: value}
    store.set("run", json.dumps(run))
    made = job("a", CPUDIST_RENDEZVOUS=f"127.0.0.1:{store.port}")
    with pytest.raises(cpudist.ProtocolError, match="Somebody else writes to it"):
        separate_jobs.meet(made, made.apart, lambda: PATIENCE_S)


def test_ids_and_incarnations_that_no_trainer_has_written_are_refused(store):
    made = job("a")
    assert separate_jobs.claim(store, made) == (0, 1)
    store.add(f"started/{job_name(made)}/0", 2**32)
    with pytest.raises(cpudist.ProtocolError, match="incarnation is 4294967298"):
        separate_jobs.claim(store, made)
    with pytest.raises(cpudist.ProtocolError, match="incarnation is 4294967299"):
        separate_jobs.keep_id(store, made, 0)
    store.set(f"base/{job_name(made)}", json.dumps([2**16, 1]))
    with pytest.raises(cpudist.ProtocolError, match="id is 65536"):
        separate_jobs.claim(store, made)


def job_name(made):
    """As ids are kept for it."""
    return f"{host.identity()}/{made.job}"


@pytest.fixture
def free_port_of_nobody():
    from ports import free_port

    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("first", [separate_jobs.TOGETHER, separate_jobs.AT_ONCE])
def test_whoever_comes_first_says_for_all_how_a_run_starts(first, store):
    """One that waits for all at a barrier waits for those that go on, too."""
    clients = [Client() for _ in range(3)]
    apart = job("a").apart
    separate_jobs.begin(apart, store, clients[0], first)
    store.delete_key("started")  # as those see it that come at the same time
    for one, how in zip(
        clients[1:], (separate_jobs.TOGETHER, separate_jobs.AT_ONCE), strict=True
    ):
        separate_jobs.begin(apart, store, one, how)
        store.delete_key("started")
    wait = int(first == separate_jobs.TOGETHER)
    assert [one.barriers for one in clients] == [wait] * 3


def test_who_joins_later_waits_for_nobody(store):
    apart, late = job("a").apart, Client()
    separate_jobs.begin(apart, store, Client(), separate_jobs.TOGETHER)
    separate_jobs.begin(apart, store, late, separate_jobs.TOGETHER)
    assert late.barriers == 0
