# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A meeting point answers, whoever else comes: strangers, many, slow ones, rubbish."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import threading
from types import SimpleNamespace

import pytest
from meeting_points import KEY, OTHER, kept, refuses, store_at, until_closed
from patience import PATIENCE_S

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.launch.meeting.board import Board
from torch_cpudist.launch.meeting.frames import Frame, written
from torch_cpudist.launch.meeting.point import Bounds, MeetingPoint
from torch_cpudist.monitor.reading import families_of


def come(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


@pytest.mark.parametrize("key", [None, KEY])
def test_words_go_there_and_back(key):
    text = 'a text: \u00e9\n\x00 "{}" \ud800' + "x" * 50_000
    with kept(Board({"run": "r" * 500_000}), key) as (point, port):
        one, other = store_at(port, key), store_at(port, key)
        assert one.get("run") == "r" * 500_000
        one.set("a", text)
        assert other.get("a") == text
        assert other.check(["run", "a"])
        assert not other.check(["b"])
        assert [one.add("n", 2), other.add("n", 0), other.add("n", 1)] == [2, 2, 3]
        assert one.compare_set("c", "", "mine") == "mine"
        assert other.compare_set("c", "", "theirs") == "mine"
        with pytest.raises(cpudist.ProtocolError, match="server 0's alone"):
            one.set("run", "mine")
        with pytest.raises(cpudist.AddressError, match="no word 'd'"):
            one.get("d")
        assert point.refused == 0


@pytest.mark.parametrize(
    ("servers", "trainers", "why", "refused"),
    [
        (KEY, OTHER, "wrong key: ", 1),
        (KEY, None, "no key here: ", 1),
        (None, KEY, "no key there: ", 0),
    ],
)
def test_who_has_another_key_neither_reads_nor_writes(servers, trainers, why, refused):
    board = Board({"run": "7"})
    with kept(board, servers) as (point, port):
        for ask in (
            lambda one: one.get("run"),
            lambda one: one.set("a", "x"),
            lambda one: one.add("a", 1),
        ):
            with pytest.raises(cpudist.AuthenticationError, match=why):
                ask(store_at(port, trainers))
        assert not store_at(port, servers).check(["a"])
        assert refuses(point, 3 * refused)


def test_who_does_not_prove_the_key_is_not_heard():
    """Not even where it has said a hello as one who has it."""
    request = written({"op": "set", "name": "a", "text": "x"})
    with kept(key=KEY) as (point, port):
        for number, nonce in enumerate(["ab" * 16, ""]):
            for proof in (bytes(32), b"\x01" * 32):
                with come(port) as stranger:
                    hello = Frame(written({"version": 1, "nonce": nonce}))
                    stranger.sendall(hello.packed() + Frame(request, proof).packed())
                    came = until_closed(stranger)
                assert came.count(b'"version"') == 1
                assert b'"value"' not in came
            assert refuses(point, 2 * number + 2)
        assert not store_at(port, KEY).check(["a"])


class Relay:
    """Somebody on the way to a port, who keeps what was said.

    Attributes:
        said: by those who came, each on its connection.
    """

    def __init__(self, port, cuts=0):
        self.said = []
        self._port, self._cuts = port, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            self.said.append(b"")
            there = come(self._port)
            back = threading.Thread(
                target=self._back, args=(here, there, len(self.said)), daemon=True
            )
            back.start()
            while data := _received(here):
                self.said[-1] += data
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            back.join(PATIENCE_S)
            here.close()
            there.close()

    def _back(self, here, there, number):
        while data := _received(there):
            if b'"value"' in data and number <= self._cuts:
                here.shutdown(socket.SHUT_RDWR)
                return
            here.sendall(data)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _received(connection):
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def lead(patches, relay):
    """Has this thread's connections go by way of the relay, unawares."""
    connect, me = socket.socket.connect, threading.current_thread()

    def led(self, address):
        mine = threading.current_thread() is me
        return connect(self, (address[0], relay.port) if mine else address)

    patches.setattr(socket.socket, "connect", led)


@pytest.fixture
def relays():
    made = []

    def make(port, **others):
        made.append(Relay(port, **others))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_nobody_is_led_to_the_point_of_another_address(relays):
    """As one of another run that has the same key, by who hands on all bytes."""
    with kept(key=KEY) as (point, port):
        relay = relays(port)
        for one in (store_at(port, KEY, host="localhost"), store_at(relay.port, KEY)):
            with pytest.raises(cpudist.AuthenticationError, match="another address"):
                one.add("n", 1)
        assert refuses(point, 2)
        assert store_at(port, KEY).add("n", 0) == 0


def test_a_whole_conversation_is_good_once(relays, monkeypatch):
    """Also where it was overheard on the way to the right address."""
    with kept(key=KEY) as (point, port):
        relay = relays(port)
        with monkeypatch.context() as patches:
            lead(patches, relay)
            assert store_at(port, KEY).add("n", 1) == 1
        (said,) = relay.said
        assert said.count(b'"add"') == 1
        for _ in range(3):
            with come(port) as stranger:
                stranger.sendall(said)
                until_closed(stranger)
        assert refuses(point, 3)
        assert store_at(port, KEY).add("n", 0) == 1


@pytest.mark.parametrize("key", [None, KEY])
def test_a_lost_answer_is_asked_for_again_and_counts_once(key, relays, monkeypatch):
    with kept(key=key) as (_, port):
        relay = relays(port, cuts=2)
        lead(monkeypatch, relay)
        assert store_at(port, key).add("n", 1) == 1
        assert len(relay.said) == 3
        assert store_at(port, key).add("n", 0) == 1


@pytest.mark.parametrize("key", [None, KEY])
def test_many_at_once_are_counted_exactly(key):
    found = [[] for _ in range(8)]
    won = []

    def count(mine):
        store = store_at(port, key)
        for _ in range(25):
            mine.append(store.add("n", 1))
        won.append(store.compare_set("first", "", f"thread {id(mine)}"))

    with kept(key=key) as (_, port):
        threads = [threading.Thread(target=count, args=(one,)) for one in found]
        for one in threads:
            one.start()
        for one in threads:
            one.join(PATIENCE_S)
    assert sorted(number for one in found for number in one) == list(range(1, 201))
    assert len(won) == 8
    assert len(set(won)) == 1


@pytest.mark.parametrize("key", [None, KEY])
def test_rubbish_ends_nothing_but_its_own_connection(key):
    dice = random.Random(7)
    hello = Frame(written({"version": 1, "nonce": "ab" * 16 if key else ""})).packed()
    pieces = [b"", b"{}", b"[", b"null", b"\xff\xfe", b"[" * 20_000, b'{"op":"get"}',
              b'{"version":1}', b'{"version":"1","nonce":""}', b"GET / HTTP/1.1\r\n",
              b'{"version":2,"nonce":""}']  # fmt: skip
    with kept(Board({"run": "7"}), key) as (_, port):
        for number in range(300):
            data = dice.choice([b"", hello])
            if number % 3:
                data += Frame(dice.choice(pieces), dice.randbytes(32)).packed()
            data += dice.randbytes(dice.randrange(100))
            with come(port) as stranger:
                stranger.sendall(data)
                with contextlib.suppress(OSError):  # it was closed at once
                    stranger.shutdown(socket.SHUT_WR)
                until_closed(stranger)
        assert store_at(port, key).get("run") == "7"


def test_a_message_that_is_too_long_is_not_read():
    with kept() as (_, port), come(port) as stranger:
        stranger.sendall((64 * 1024 + 1).to_bytes(4, "big") + bytes(32))
        assert until_closed(stranger) == b""


def test_who_says_nothing_has_to_go_after_a_while():
    with kept(bounds=Bounds(visit_s=0.05)) as (_, port), come(port) as silent:
        with come(port) as slow:
            slow.sendall(b"\x00")
            assert until_closed(slow) == b""
        assert until_closed(silent) == b""


def test_the_oldest_goes_when_too_many_are_there():
    """However long it might stay; so that whoever has something to ask gets in."""
    bounds = Bounds(visitors=3, visit_s=PATIENCE_S)
    with kept(Board({"run": "7"}), bounds=bounds) as (_, port):
        idle = [come(port) for _ in range(5)]
        assert [until_closed(one) for one in idle[:2]] == [b"", b""]
        assert [store_at(port).get("run") for _ in range(3)] == ["7"] * 3
        assert until_closed(idle[2]) == b""
        for one in idle:
            one.close()


class Fails(Board):
    """A board that is out of memory when it is first asked."""

    def __init__(self):
        super().__init__()
        self.left = 1

    def check(self, names):
        self.left -= 1
        if self.left >= 0:
            raise MemoryError
        return True


def test_one_without_memory_for_a_moment_goes_on():
    with kept(Fails()) as (_, port):
        assert store_at(port).check(["a"])


class Crowded(socket.socket):
    """A listener of a process that has no descriptor left for a while."""

    def __init__(self):
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen()
        self.left = 3

    def accept(self):
        self.left -= 1
        if self.left >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_one_without_descriptors_for_a_moment_goes_on():
    listener = Crowded()
    port = listener.getsockname()[1]
    point = MeetingPoint(listener, f"127.0.0.1:{port}", Board({"run": "7"}))
    try:
        assert store_at(port).get("run") == "7"
        assert listener.left < 0
    finally:
        point.stop()


def shown_of(point):
    """What server 0's page says of who was refused."""
    server = _core.Server(run_id=7, shard_id=0, server_count=1, trainer_count=1)
    numbers = {"rank": 0, "trainer_rank": -1, "trainer_count": 1, "server_count": 1}
    run = SimpleNamespace(
        role="server",
        shard_id=0,
        endpoints=SimpleNamespace(server=server, meeting=point),
        environment=SimpleNamespace(server=SimpleNamespace(memory_cap_bytes=0)),
        **numbers,
    )
    try:
        families = {family.name: family.values for family in families_of(run)}
    finally:
        server.stop()
    return families["cpudist_meeting_refused"]


def test_those_who_are_refused_are_named_once_and_all_counted(caplog):
    with kept(key=KEY) as (point, port):
        for _ in range(4):
            with pytest.raises(cpudist.AuthenticationError):
                store_at(port, OTHER).check(["a"])
        assert refuses(point, 4)
        assert shown_of(point) == {(): 4}
    told = [one.getMessage() for one in caplog.records if "refused" in one.getMessage()]
    assert len(told) == 1
    assert f"127.0.0.1:{port} refused 127.0.0.1:" in told[0]
    assert "wrong key" in told[0]


def test_its_port_is_free_at_once():
    with kept() as (first, port):
        assert store_at(port).add("n", 1) == 1
        with come(port) as idle:
            first.stop()
            first.stop()
            with kept(port=port):
                assert store_at(port).add("n", 1) == 1
            assert until_closed(idle) == b""


def test_a_forked_process_holds_no_port():
    with kept() as (point, port):
        child = os.fork()
        if child == 0:
            try:
                listens = socket.create_server(("127.0.0.1", port), reuse_port=False)
                listens.close()
                os._exit(1)  # the parent's is there
            except OSError:
                point.stop()
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store_at(port).add("n", 1) == 1
        mine, its = socket.socketpair()
        child = os.fork()
        if child == 0:
            mine.close()
            its.send(b"here")
            its.recv(1)  # until the parent has looked
            os._exit(0)
        its.close()
        mine.recv(4)
        point.stop()
        with kept(port=port):
            assert store_at(port).add("n", 1) == 1
        mine.close()
        os.waitpid(child, 0)
