# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Who asks at a meeting point waits no longer than it has time, whoever is there."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest
from interrupts import interrupted
from meeting_points import KEY, answering, kept, store_at, until_closed
from patience import PATIENCE_S
from ports import free_port

import torch_cpudist as cpudist
from torch_cpudist.launch.meeting.board import Board
from torch_cpudist.launch.meeting.frames import Frame, FrameReader, written
from torch_cpudist.launch.meeting.store import Clocks

# Several attempts, and what each of them waits for, in a fraction of a second.
QUICK = Clocks(attempt_s=0.1, least_s=0.05)


def within(seconds):
    """Time left, from now on."""
    until = time.monotonic() + seconds
    return lambda: until - time.monotonic()


def silent(connection):
    until_closed(connection)


def dripping(connection):
    """A byte now and then of what might become a message."""
    for byte in b"\x00\x00\x00\x02" + bytes(32):
        time.sleep(0.02)
        connection.send(bytes([byte]))
    until_closed(connection)


def closing(connection):
    pass


def frozen():
    """A port at which a process that is stopped would listen: nobody accepts."""
    return socket.create_server(("127.0.0.1", 0))


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("answer", [silent, dripping, closing])
def test_no_answer_is_waited_for_as_long_as_there_is_time(answer, key):
    with answering(answer) as port:
        store = store_at(port, key, within(0.3), QUICK)
        for ask in (
            lambda: store.check(["run"]),
            lambda: store.get("run"),
            lambda: store.set("a", "x"),
            lambda: store.add("a", 1),
            lambda: store.compare_set("a", "", "x"),
        ):
            with pytest.raises(cpudist.OperationTimeoutError, match="nobody answers"):
                ask()


def test_a_process_that_is_stopped_is_waited_for_as_long_as_there_is_time():
    with frozen() as listener:
        port = listener.getsockname()[1]
        match = f"CPUDIST_RENDEZVOUS=127.0.0.1:{port} .* no answer in time"
        with pytest.raises(cpudist.OperationTimeoutError, match=match):
            store_at(port, None, within(0.3), QUICK).check(["run"])


def test_one_that_takes_no_connection_is_waited_for_as_long_as_there_is_time():
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(8)]
        for one in waiting:  # until the system answers no more
            one.setblocking(False)
            one.connect_ex(address)
        with pytest.raises(cpudist.OperationTimeoutError, match="no connection in tim"):
            store_at(address[1], None, within(0.3), QUICK).check(["run"])
        for one in waiting:
            one.close()


def test_where_nobody_listens_somebody_may_come():
    port = free_port()
    left = 5

    def remaining_s():
        nonlocal left
        left -= 1
        return left

    with pytest.raises(cpudist.OperationTimeoutError, match="refused"):
        store_at(port, None, remaining_s).check(["run"])
    assert left <= 0


def test_one_try_is_made_where_there_is_no_time_left():
    with kept(Board({"run": "7"})) as (_, port):
        assert store_at(port, None, lambda: 0.0).get("run") == "7"


@pytest.mark.parametrize("how", ["no time left", "end"])
def test_a_wait_ends_with_what_it_is_for(how):
    """It began with patience, and somebody is there who says nothing."""
    over = threading.Event()

    def answer(connection):
        if how == "end":
            store.end("a rank has ended")
        over.set()
        until_closed(connection)

    with answering(answer) as port:
        store = store_at(port, None, lambda: 0.0 if over.is_set() else PATIENCE_S)
        raises = cpudist.ClosedError if how == "end" else cpudist.OperationTimeoutError
        with pytest.raises(raises):
            store.check(["run"])
        with pytest.raises(raises):
            store.add("n", 1)


def test_ctrl_c_ends_a_wait():
    came = threading.Event()

    def answer(connection):
        came.set()
        until_closed(connection)

    with (
        answering(answer) as port,
        pytest.raises(KeyboardInterrupt),
        interrupted(came.is_set),
    ):
        store_at(port).check(["run"])


PAGE = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("key", [None, KEY])
def test_another_program_is_said(key):
    with answering(lambda one: one.sendall(PAGE)) as port:
        with pytest.raises(cpudist.ProtocolError, match="Is another program on that"):
            store_at(port, key).check(["run"])


@pytest.mark.parametrize("key", [None, KEY])
def test_rubbish_is_a_typed_error_in_time(key):
    dice = random.Random(11)
    expected = (
        cpudist.ProtocolError,
        cpudist.OperationTimeoutError,
        cpudist.AuthenticationError,
    )

    def answer(connection):
        text = dice.choice([b"{}", b"[[", b"\xff", b"null", dice.randbytes(9)])
        data = dice.randbytes(dice.randrange(1, 60))
        whole = Frame(text, dice.randbytes(32)).packed()
        connection.sendall(dice.choice([data, whole, whole[:20]]))

    with answering(answer) as port:
        for _ in range(100):
            with pytest.raises(expected):
                store_at(port, key, lambda: 0.0, QUICK).get("run")


def heard(connection):
    reader = FrameReader(10**6)
    while True:
        data = connection.recv(reader.wants_bytes)
        if not data:
            raise ConnectionResetError
        frame = reader.feed(data)
        if frame is not None:
            return frame


WELCOME = {"version": 1, "nonce": "", "at": "", "point": "p"}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"value": "yes", "error": "", "why": ""},
        {"value": 1, "error": "", "why": ""},
        {"value": True, "error": 1, "why": ""},
        {"value": True, "error": "", "why": "", "more": 1},
        {"value": True, "error": "KeyboardInterrupt", "why": "stop"},
    ],
)
def test_an_answer_that_is_none_is_said(answer):
    def speak(connection):
        heard(connection)
        connection.sendall(Frame(written(WELCOME)).packed())
        heard(connection)
        connection.sendall(Frame(written(answer)).packed())

    with answering(speak) as port, pytest.raises(cpudist.ProtocolError):
        store_at(port).check(["run"])


def test_another_version_is_said():
    def speak(connection):
        heard(connection)
        connection.sendall(Frame(written(WELCOME | {"version": 2})).packed())

    with (
        answering(speak) as port,
        pytest.raises(cpudist.ProtocolError, match="version 2 of"),
    ):
        store_at(port).check(["run"])


@pytest.mark.parametrize("whose", ["none", "its own"])
def test_a_mirror_proves_nothing(whose):
    """It hands everything back, or makes a welcome of the nonce that it was told."""

    def reflect(connection):
        hello = heard(connection)
        text = hello.text
        if whose == "its own":
            nonce = text.decode().split('"')[5]
            at = f"127.0.0.1:{connection.getsockname()[1]}"
            text = written(WELCOME | {"nonce": nonce, "at": at})
        connection.sendall(Frame(text, hello.proof).packed())
        connection.sendall(heard(connection).packed())

    wrong = (cpudist.AuthenticationError, cpudist.ProtocolError)
    with answering(reflect) as port, pytest.raises(wrong[whose == "none"]):
        store_at(port, KEY).check(["run"])


@pytest.mark.parametrize("key", [None, KEY])
def test_one_that_has_come_in_its_place_is_of_another_run(key):
    with kept(key=key) as (first, port):
        store = store_at(port, key)
        assert store.add("n", 1) == 1
        first.stop()
        with pytest.raises(cpudist.AddressError, match="has ended"):
            store.add("n", 1)
        with kept(key=key, port=port):
            with pytest.raises(cpudist.AddressError, match="that of another run"):
                store.add("n", 1)
            assert store_at(port, key).add("n", 0) == 0


def test_one_that_has_moved_to_another_host_is_found(monkeypatch):
    """Its name leads elsewhere then, and where it was nobody answers any more."""
    leads = []

    def look_up(*_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", leads[-1]))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with kept() as (first, port), kept() as (_, moved):
        leads.append(port)
        store = store_at(port, clocks=QUICK)
        assert store.add("n", 1) == 1
        first.stop()
        with socket.create_server(("127.0.0.1", port)):  # which does not answer
            leads.append(moved)
            with pytest.raises(cpudist.AddressError, match="that of another run"):
                store.add("n", 1)


def test_a_word_that_is_too_long_is_not_sent():
    with kept() as (_, port):
        with pytest.raises(cpudist.InvalidArgumentError, match="at most 65536 go"):
            store_at(port).set("a", "x" * 70_000)


def test_without_a_thread_for_it_the_limit_to_raise_is_named(monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    with kept() as (_, port):
        store = store_at(port)
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(cpudist.AddressError, match="no thread left"):
            store.get("a")


def test_a_name_that_does_not_resolve_is_said():
    with pytest.raises(cpudist.AddressError, match="does not resolve"):
        store_at(1, host="no host.invalid").check(["run"])


def test_a_resolver_that_does_not_answer_is_waited_for_as_long_as_there_is_time(
    monkeypatch,
):
    over = threading.Event()
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [over.wait(PATIENCE_S)][1:]
    )
    with pytest.raises(cpudist.OperationTimeoutError, match="not resolved in time"):
        store_at(1, None, within(0.2), QUICK).check(["run"])
    over.set()
