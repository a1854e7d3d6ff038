# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
# long: the doubles of what takes part, and the tests that need them
"""Ids of trainers that outlive the store, and what a wait for servers refuses."""

from __future__ import annotations

import json
import select
import socket

import pytest
from meeting_points import kept
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist.launch import environment, separate_jobs
from torch_cpudist.launch.comeback import Comeback
from torch_cpudist.launch.endpoints import Endpoints
from torch_cpudist.launch.layout import Numbers
from torch_cpudist.launch.meeting.board import Board
from torch_cpudist.machine import host
from torch_cpudist.settings.words import Words

AWAY = {
    "CPUDIST_ROLE": "trainer",
    "CPUDIST_RENDEZVOUS": "127.0.0.1:29600",
    "CPUDIST_REJOIN_S": "60",
}


@pytest.fixture
def store():
    return Board()


def job(name, ranks=1, rank=0, **others):
    variables = {"TORCHELASTIC_RUN_ID": name, "WORLD_SIZE": str(ranks)}
    variables |= {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    variables |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    found = AWAY | variables | others
    return environment.parse({n: text for n, text in found.items() if text is not None})


def test_trainers_keep_their_ids_and_others_take_those_that_are_free(store):
    """Whoever comes first: ids of those that are away are not given twice."""
    kept = job("two", 2, 1)
    assert separate_jobs.keep_id(store, kept, Words(), 2) == 1
    assert separate_jobs.claim(store, job("new"), Words()) == (0, 1)
    assert separate_jobs.claim(store, job("two", 2, 0), Words()) == (1, 1)
    assert separate_jobs.claim(store, job("later"), Words()) == (3, 1)
    # They are the next incarnations when they are started again.
    assert separate_jobs.claim(store, kept, Words()) == (2, 2)
    assert separate_jobs.keep_id(store, kept, Words(), 2) == 3


def test_who_was_slower_than_a_new_job_is_told(store):
    assert separate_jobs.claim(store, job("new"), Words()) == (0, 1)
    with pytest.raises(cpudist.ConfigMismatchError, match="Start this job again"):
        separate_jobs.keep_id(store, job("old"), Words(), 0)
    assert separate_jobs.claim(store, job("old"), Words()) == (1, 1)


@pytest.mark.parametrize(("role", "waits"), [("server", 600), ("trainer", 0)])
def test_without_the_variable_servers_wait_and_trainers_do_not(role, waits):
    variables = {"CPUDIST_ROLE": role, "CPUDIST_RENDEZVOUS": "localhost:29600"}
    made = environment.parse(variables | {"CPUDIST_TRAINERS": "1"})
    assert made.apart.rejoin_s == waits


class Client:
    """One whose servers are lost."""

    barriers = 0

    def __init__(self, told=False, away=False, ended=False):
        self.told, self.away, self.ended = told, away, ended

    def counted_lost(self):
        return self.told

    def out_of_reach(self):
        return self.away

    def server_ended(self):
        return self.ended

    def waited_s(self):
        return 2.0

    def abort(self, reason):
        self.reason = reason

    def barrier(self):
        self.barriers += 1


class Fails:
    """What takes part, and has no values for the servers that come."""

    def cannot_outlive(self, index, rejoins):
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

    def cannot_outlive(self, index, rejoins):
        return f"{self.why} {index}" if self.why else ""

    def let_go(self):
        self.let += 1

    def go_on_with(self, client, limit_s):
        raise AssertionError("no servers have come")


def comeback(parts, closed=lambda: False, client=None, **others):
    ends = Endpoints(client=client or Client(), run_id=7)
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
    def connected(*_):
        raise cpudist.PeerLostError("server 1 was lost, too")

    started(store)
    answers(monkeypatch, store, 7, connected)
    ends, one = comeback([Noted()], CPUDIST_REJOIN_S="1")
    with pytest.raises(cpudist.PeerLostError, match="within 1 s") as raised:
        one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)
    told = str(raised.value)
    assert "still answers at CPUDIST_RENDEZVOUS=127.0.0.1:29600" in told
    assert "cannot be joined (PeerLostError: server 1 was lost, too)" in told
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
        self.learned = []

    def learn_losses(self, client):
        self.learned.append(client)

    def cannot_outlive(self, index, rejoins):
        return ""

    def let_go(self):
        pass

    def go_on_with(self, client, limit_s):
        self.clients.append(client)


# -- servers that have lost this trainer -------------------------------------------


class Rejoins(GoesOn):
    """What takes part, and goes on with the same servers only."""

    def __init__(self):
        super().__init__()
        self.let, self.limits = 0, []

    def cannot_outlive(self, index, rejoins):
        return "" if rejoins else "there are no snapshots"

    def let_go(self):
        self.let += 1

    def go_on_with(self, client, limit_s):
        super().go_on_with(client, limit_s)
        self.limits.append(limit_s)


def started(store, times=1):
    """This trainer's rank was started so often."""
    store.add(f"started/{job_name(job('a'))}/0", times)


def joins(monkeypatch, store, run_id=7, failures=0):
    """Servers of this run take any incarnation, but at first fail so often."""
    came, incarnations = Client(), []

    def connected(made, numbers, run, incarnation, connect_s):
        incarnations.append(incarnation)
        if len(incarnations) <= failures:
            raise cpudist.PeerLostError("server 1 is not there yet")
        ends = Endpoints(client=came, run_id=run_id, incarnation=incarnation)
        return ends, came

    answers(monkeypatch, store, run_id, connected)
    return came, incarnations


@pytest.mark.parametrize(
    ("waits", "client"),
    [(None, Client(told=True)), ("60", Client(told=True)), ("60", Client(away=True))],
)
def test_who_was_counted_as_lost_joins_the_same_servers(
    waits, client, store, monkeypatch
):
    """As its next incarnation, with another one for each attempt."""
    started(store)
    came, incarnations = joins(monkeypatch, store, failures=2)
    part = Rejoins()
    ends, one = comeback([part], client=client, CPUDIST_REJOIN_S=waits)
    one.outlive(cpudist.PeerLostError("it was counted as lost"), client)
    assert (part.clients, part.limits, part.let) == ([came], [None], 1)
    assert incarnations == [2, 3, 4]
    assert (ends.client, ends.run_id, ends.incarnation) == (came, 7, 4)
    one.check()


def meets_in_turn(monkeypatch, store, connected):
    """Run 7 is met twice, then run 8; returns those that are yet to be met."""
    runs = [7, 7, 8]

    def meet(*_):
        return store, {"run_id": runs.pop(0), "servers": [[]], "trainers": 1}

    monkeypatch.setattr(separate_jobs, "meet", meet)
    monkeypatch.setattr(separate_jobs, "connected", connected)
    monkeypatch.setattr(separate_jobs, "begin", lambda *_: None)
    return runs


@pytest.mark.parametrize("known", ["at once", "later"])
def test_those_that_a_killed_server_has_left_are_not_joined_again(
    known, store, monkeypatch
):
    """They are to see that nobody is there; who takes their place is joined."""
    started(store)
    client, came = Client(ended=known == "at once"), Client()
    tried = []

    def connected(made, numbers, run, incarnation, connect_s):
        tried.append(run["run_id"])
        if run["run_id"] == 7:
            client.ended = True  # it has said why it ends, and ends now
            raise cpudist.PeerLostError("server 1 was lost")
        return Endpoints(client=came, run_id=8), came

    meets_in_turn(monkeypatch, store, connected)
    part = GoesOn()
    _, one = comeback([part], client=client)
    one.outlive(cpudist.PeerLostError("server 1 was lost"), client)
    assert tried == ([8] if known == "at once" else [7, 8])
    assert (part.clients, part.learned) == ([came], [])


def test_who_waits_in_vain_beside_those_that_a_killed_server_has_left(
    store, monkeypatch
):
    """Started again it could not join them either."""
    started(store)
    answers(monkeypatch, store, 7)
    client = Client(ended=True)
    _, one = comeback([Noted()], client=client, CPUDIST_REJOIN_S="1")
    with pytest.raises(cpudist.PeerLostError, match="within 1 s") as raised:
        one.outlive(cpudist.PeerLostError("server 1 was lost"), client)
    told = str(raised.value)
    assert "those that it has left still answer at CPUDIST_RENDEZVOUS=" in told
    assert "start this job again" not in told


def test_a_store_that_names_servers_whose_place_others_have_is_asked_again(
    store, monkeypatch
):
    """It is that of another server, which ends a little later."""
    started(store)
    client, came = Client(), Client()

    def connected(made, numbers, run, incarnation, connect_s):
        if run["run_id"] == 7:
            raise cpudist.ProtocolError("hello of another run")
        return Endpoints(client=came, run_id=8), came

    runs = meets_in_turn(monkeypatch, store, connected)
    part = GoesOn()
    _, one = comeback([part], client=client)
    lost = "server 1 was lost: another server has taken its place"
    one.outlive(cpudist.PeerLostError(lost), client)
    assert (runs, part.clients) == ([], [came])


class LostOnceMore(Rejoins):
    """What takes part, and meets another loss at the first try."""

    def __init__(self, others):
        super().__init__()
        self.others = others

    def go_on_with(self, client, limit_s):
        super().go_on_with(client, limit_s)
        if len(self.clients) == 1:
            assert [one.clients for one in self.others] == [[client]]
            raise cpudist.PeerLostError("server 0 was lost once more")


def test_all_learn_what_was_lost_before_the_first_one_goes_on(store, monkeypatch):
    """A client's first request ends what servers tell of the incarnation before it."""
    started(store)
    came = [Client(told=True), Client()]
    order = []

    def connected(made, numbers, run, incarnation, connect_s):
        client = came[incarnation - 2]
        order.append(client)
        return Endpoints(client=client, run_id=7, incarnation=incarnation), client

    class Opens(Rejoins):
        def go_on_with(self, client, limit_s):
            assert [one.learned[-1] for one in (self, last)] == [client, client]
            super().go_on_with(client, limit_s)

    answers(monkeypatch, store, 7, connected)
    first = Opens()
    last = LostOnceMore([first])
    client = Client(told=True)
    _, one = comeback([first, last], client=client)
    one.outlive(cpudist.PeerLostError("it was counted as lost"), client)
    assert order == first.clients == last.clients == first.learned == last.learned
    assert order == came


class Unheard:
    """A store of which the first answers to a count are lost."""

    def __init__(self, store, lost):
        self.store, self.lost = store, lost

    def __getattr__(self, name):
        return getattr(self.store, name)

    def add(self, key, amount):
        number = self.store.add(key, amount)
        self.lost -= 1
        if self.lost >= 0:
            raise cpudist.OperationTimeoutError("the network was cut")
        return number


def test_a_number_whose_issue_was_not_heard_of_is_nobody_elses(store, monkeypatch):
    started(store)
    client = Client(told=True)
    came, incarnations = joins(monkeypatch, Unheard(store, 2))
    part = Rejoins()
    ends, one = comeback([part], client=client)
    one.outlive(cpudist.PeerLostError("it was counted as lost"), client)
    assert part.clients == [came]
    assert incarnations == [4]
    assert ends.incarnation == 4
    # Another process, started after that one, is still told from it.
    started(store, 1)
    again = Client(told=True)
    ends.client = again
    with pytest.raises(cpudist.FencedError):
        one.outlive(cpudist.PeerLostError("it was counted as lost"), again)


def test_what_was_not_heard_of_in_one_run_lets_nobody_into_the_next(store, monkeypatch):
    """Numbers that may have been issued to this trainer are of that run only."""
    started(store)
    came, _ = joins(monkeypatch, Unheard(store, 2))
    monkeypatch.setattr(separate_jobs, "begin", lambda *_: None)
    client = Client(told=True)
    ends, one = comeback([GoesOn()], client=client)
    runs = [7, 7, 8]

    def meet(*_):
        run = {"run_id": runs.pop(0), "servers": [[]], "trainers": 1}
        return (Unheard(store, 1) if run["run_id"] == 7 else store), run

    monkeypatch.setattr(separate_jobs, "meet", meet)
    one.outlive(cpudist.PeerLostError("it was counted as lost"), client)
    assert (ends.client, runs) == (came, [])
    # A process in this one's place; then this one is counted as lost in that run.
    started(store, 1)
    again = Client(told=True)
    ends.client, ends.run_id = again, 8
    runs.append(8)
    with pytest.raises(cpudist.FencedError):
        one.outlive(cpudist.PeerLostError("it was counted as lost"), again)


@pytest.mark.parametrize(
    ("waits", "client"),
    [(None, Client(away=True)), ("0", Client(away=True)), ("0", Client(told=True))],
)
def test_without_the_variable_silence_is_not_waited_for(
    waits, client, store, monkeypatch
):
    """Nor is anything where it is 0."""
    started(store)
    _, incarnations = joins(monkeypatch, store)
    _, one = comeback([Rejoins()], client=client, CPUDIST_REJOIN_S=waits)
    lost = cpudist.PeerLostError("server 0 was lost")
    with pytest.raises(cpudist.PeerLostError) as raised:
        one.outlive(lost, client)
    assert raised.value is lost
    assert not incarnations


@pytest.mark.parametrize("waits", [None, "60"])
def test_who_trains_together_with_others_does_not_join_again(waits, store, monkeypatch):
    started(store)
    _, incarnations = joins(monkeypatch, store)
    client, part = Client(told=True), Noted("trainers step together")
    _, one = comeback([part], client=client, CPUDIST_REJOIN_S=waits)
    lost = cpudist.PeerLostError("it was counted as lost")
    with pytest.raises(cpudist.PeerLostError) as raised:
        one.outlive(lost, client)
    assert (raised.value is lost) == (waits is None)
    assert part.let == 0
    assert not incarnations


def test_a_process_that_was_started_in_its_place_is_left_alone(store, monkeypatch):
    started(store, 2)
    _, incarnations = joins(monkeypatch, store)
    client = Client(told=True)
    _, one = comeback([Rejoins()], client=client, CPUDIST_REJOIN_S=None)
    lost = cpudist.PeerLostError("it was counted as lost")
    for _ in range(2):
        with pytest.raises(cpudist.FencedError, match="incarnation 2 was started"):
            one.outlive(lost, client)
    assert not incarnations


def test_other_servers_are_refused_by_who_can_go_on_with_the_same_only(
    store, monkeypatch
):
    _, incarnations = joins(monkeypatch, store, run_id=8)
    client = Client()
    _, one = comeback([Rejoins()], client=client)
    match = r"server 0 was lost\. .* does not help here: there are no snapshots"
    with pytest.raises(cpudist.PeerLostError, match=match):
        one.outlive(cpudist.PeerLostError("server 0 was lost"), client)
    assert not incarnations


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
    # Two pauses, and what calls of the client before were blocked for.
    assert one.waited_s >= 2.0 + 2 * 0.2


def test_a_stranger_who_stays_is_named_at_the_end(store, monkeypatch):
    def connected(*_):
        raise cpudist.AuthenticationError("server 0 at tcp:127.0.0.1:1: wrong key")

    answers(monkeypatch, store, 8, connected)
    ends, one = comeback([GoesOn()], CPUDIST_REJOIN_S="1")
    with pytest.raises(cpudist.PeerLostError, match=r"within 1 s .*wrong key"):
        one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)


@pytest.mark.parametrize(
    "word", ["x", "[]", "{}", '{"run_id": 8, "trainers": 1, "servers": 5}']
)
def test_rubbish_where_servers_are_to_come_ends_no_wait(word):
    """It is named at the end."""
    with kept(Board({"run": word})) as (_, port):
        where = {"CPUDIST_RENDEZVOUS": f"127.0.0.1:{port}", "CPUDIST_REJOIN_S": "1"}
        ends, one = comeback([GoesOn()], **where)
        with pytest.raises(cpudist.PeerLostError, match=r"within 1 s .*ProtocolError"):
            one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)


def mute(listener):
    """Whether somebody has come, who is not answered."""
    ready, _, _ = select.select([listener], [], [], 0)
    return bool(ready)


@pytest.mark.parametrize("closes", [False, True])
def test_servers_that_do_not_answer_are_waited_for_no_longer_than_said(closes):
    """As a server 0 that is stopped: its system takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = {"CPUDIST_RENDEZVOUS": f"127.0.0.1:{listener.getsockname()[1]}"}
        waits = {"CPUDIST_REJOIN_S": str(int(PATIENCE_S)) if closes else "1"}

        def closed():
            return closes and mute(listener)

        ends, one = comeback([GoesOn()], closed, **where, **waits)
        error = cpudist.ClosedError if closes else cpudist.PeerLostError
        match = "ended its run" if closes else r"within 1 s .*no answer in time"
        with pytest.raises(error, match=match):
            one.outlive(cpudist.PeerLostError("server 0 was lost"), ends.client)


@pytest.mark.parametrize(
    ("name", "value"),
    [("run_id", -1), ("run_id", 2**64), ("run_id", "1"), ("run_id", True),
     ("trainers", 0), ("trainers", 2**16), ("trainers", None)],
)  # fmt: skip
def test_numbers_that_no_server_has_written_are_refused(name, value):
    run = {"run_id": 7, "servers": [[]], "trainers": 1, "settings": {}} | {name: value}
    with kept(Board({"run": json.dumps(run)})) as (_, port):
        made = job("a", CPUDIST_RENDEZVOUS=f"127.0.0.1:{port}")
        with pytest.raises(cpudist.ProtocolError, match="Somebody else writes to it"):
            separate_jobs.meet(made, made.apart, lambda: PATIENCE_S)


def test_ids_and_incarnations_that_no_trainer_has_written_are_refused(store):
    made = job("a")
    assert separate_jobs.claim(store, made, Words()) == (0, 1)
    store.add(f"started/{job_name(made)}/0", 2**32)
    with pytest.raises(cpudist.ProtocolError, match="incarnation is 4294967298"):
        separate_jobs.claim(store, made, Words())
    with pytest.raises(cpudist.ProtocolError, match="incarnation is 4294967299"):
        separate_jobs.keep_id(store, made, Words(), 0)
    store.set(f"base/{job_name(made)}", json.dumps([2**16, 1]))
    with pytest.raises(cpudist.ProtocolError, match="id is 65536"):
        separate_jobs.claim(store, made, Words())


KEY = {"CPUDIST_SECRET": "a key of at least thirty-two bytes"}
OTHER = {"CPUDIST_SECRET": "another key of at least thirty-two bytes"}


@pytest.mark.parametrize(
    ("key", "writer", "why"),
    [(KEY, {}, "no key there"), (KEY, OTHER, "wrong key"), ({}, KEY, "no key here")],
)
def test_a_run_that_somebody_else_has_written_is_not_followed(key, writer, why):
    run = {"run_id": 7, "servers": [["tcp:127.0.0.1:1"]], "trainers": 1, "hosts": ["x"]}
    settings = environment.agreed_settings(job("a", **key))
    del settings["CPUDIST_SERVERS"]
    word = json.dumps(run | {"settings": settings})
    proves = key["CPUDIST_SECRET"].encode() if key else None

    def met(one):
        words = Words(environment.parse(one).secret)
        with kept(Board({"run": words.sign("run", word)}), proves) as (_, port):
            made = job("a", CPUDIST_RENDEZVOUS=f"127.0.0.1:{port}", **key)
            return separate_jobs.meet(made, made.apart, lambda: PATIENCE_S)[1]

    with pytest.raises(cpudist.AuthenticationError, match=f"'run' is refused, {why}"):
        met(writer)
    assert met(key)["servers"] == run["servers"]


def test_ids_that_somebody_else_has_written_are_not_taken(store):
    """Nor those of the same job in another run, put back."""
    made = job("a", **KEY)
    words, earlier = (separate_jobs.words_of(made, {"run_id": one}) for one in (2, 1))
    assert separate_jobs.claim(store, made, words) == (0, 1)
    assert separate_jobs.claim(store, made, words) == (0, 2)
    base, text = f"base/{job_name(made)}", json.dumps([1, 1])
    for forged in (text, earlier.sign(base, text), words.sign("base/other", text)):
        store.set(base, forged)
        with pytest.raises(cpudist.AuthenticationError, match=r"'base/.*' is refused"):
            separate_jobs.claim(store, made, words)
    store.set("owner/0", job_name(made))
    with pytest.raises(cpudist.AuthenticationError, match="'owner/0' is refused"):
        separate_jobs.keep_id(store, made, words, 0)
    store.set("start", separate_jobs.AT_ONCE)
    with pytest.raises(cpudist.AuthenticationError, match="'start' is refused"):
        separate_jobs.begin(store, words, Client(), separate_jobs.TOGETHER)


def job_name(made):
    """As ids are kept for it."""
    return f"{host.identity()}/{made.job}"


@pytest.fixture
def free_port_of_nobody():
    from ports import free_port

    return f"127.0.0.1:{free_port()}"


class Starting(Board):
    """As those see it who come at the same time: nobody has started yet."""

    def check(self, names):
        return False


@pytest.mark.parametrize("first", [separate_jobs.TOGETHER, separate_jobs.AT_ONCE])
def test_whoever_comes_first_says_for_all_how_a_run_starts(first):
    """One that waits for all at a barrier waits for those that go on, too."""
    clients = [Client() for _ in range(3)]
    store = Starting()
    separate_jobs.begin(store, Words(), clients[0], first)
    for one, how in zip(
        clients[1:], (separate_jobs.TOGETHER, separate_jobs.AT_ONCE), strict=True
    ):
        separate_jobs.begin(store, Words(), one, how)
    wait = int(first == separate_jobs.TOGETHER)
    assert [one.barriers for one in clients] == [wait] * 3


def test_who_joins_later_waits_for_nobody(store):
    late = Client()
    separate_jobs.begin(store, Words(), Client(), separate_jobs.TOGETHER)
    separate_jobs.begin(store, Words(), late, separate_jobs.TOGETHER)
    assert late.barriers == 0
