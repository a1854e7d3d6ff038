# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``python -m torch_cpudist top``: of a run, of nobody, and of who means it ill."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
import time
from types import SimpleNamespace

import printed
import pytest
from lazily import Lazily
from monitor_cases import fetch, free_ports, parsed, trainable
from patience import PATIENCE_S
from ports import free_port
from sync_cases import ONE_THREAD, Batches, loss_of
from sync_cases import run as run_trainers

import torch_cpudist as cpudist
from torch_cpudist.top import addresses, commands, pages
from torch_cpudist.top.addresses import Address
from torch_cpudist.top.cluster import Cluster
from torch_cpudist.top.figures import Moment, figures
from torch_cpudist.top.samples import Samples

RICH = Lazily("rich.console")
WHO = 'cpudist_rank_info{rank="1",trainer="0",server="-1"} 1\n'
PATIENT = ("--timeout", str(PATIENCE_S))


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["127.0.0.1:9400"], ["127.0.0.1:9400"]),
        (["node-7.rack:9400-9402"], [f"node-7.rack:{9400 + i}" for i in range(3)]),
        (["[::1]:9400", "[::1]:9400-9400"], ["[::1]:9400"]),
    ],
)
def test_addresses_and_ranges_of_ports(texts, expected):
    assert [str(one) for one in addresses.read(texts)] == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("9400", "HOST:PORT"),
        ("host", "HOST:PORT"),
        ("host:", "HOST:PORT"),
        ("host:http", "HOST:PORT"),
        ("::1:9400", "HOST:PORT"),
        ("http://host:9400", "HOST:PORT"),
        ("host:0", "1 to 65535"),
        ("host:65536", "1 to 65535"),
        ("host:9403-9400", "the first one first"),
        ("host:1-60000", "at most 512"),
    ],
)
def test_what_is_no_address_is_said(text, says, capsys):
    with pytest.raises(cpudist.InvalidArgumentError, match=says):
        addresses.read([text])
    assert commands.main([text, "--once"]) == 2
    assert "InvalidArgumentError" in capsys.readouterr().err


def test_a_host_that_nobody_knows_is_said(capsys):
    pytest.importorskip("rich")
    assert commands.main(["no.such.host.invalid:9400", "--once"]) == 2
    assert "AddressError: no.such.host.invalid:9400" in capsys.readouterr().err


def at(seconds, text):
    return Moment(seconds, Samples(WHO + text))


def test_figures_are_of_what_has_happened_in_between():
    name = "cpudist_step_seconds_total"
    first = at(
        10.0,
        'cpudist_steps_total{optimizer="0"} 100\n'
        'cpudist_steps_total{optimizer="1"} 7\n'
        f'{name}{{optimizer="0"}} 1\n'
        'cpudist_bytes_total{direction="sent"} 5000\n'
        'cpudist_staleness_updates_bucket{le="0.0"} 50\n'
        'cpudist_staleness_updates_bucket{le="1.0"} 50\n'
        'cpudist_staleness_updates_bucket{le="+Inf"} 50\n',
    )
    last = at(
        12.0,
        'cpudist_steps_total{optimizer="0"} 130\n'
        'cpudist_steps_total{optimizer="1"} 17\n'
        f'{name}{{optimizer="0"}} 1.5\n'
        # The client began anew.
        'cpudist_bytes_total{direction="sent"} 1000\n'
        "cpudist_requests_resent_total 3\ncpudist_reconnects_total 2\n"
        "cpudist_server_lost 1\n"
        'cpudist_staleness_updates_bucket{le="0.0"} 58\n'
        'cpudist_staleness_updates_bucket{le="1.0"} 59\n'
        'cpudist_staleness_updates_bucket{le="+Inf"} 60\n',
    )
    found = figures(first, last)
    assert found.server is None
    trainer = found.trainer
    assert trainer.steps == 20
    assert trainer.phases == {"step()": 0.25}
    assert trainer.sent == 500
    assert trainer.received is None
    assert trainer.staleness == (0.0, float("inf"))
    assert trainer.retries == 5
    assert trainer.lost
    assert figures(last, last).trainer.steps is None  # of one page there is no rate


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        'cpudist_steps{a="1" 3',
        "cpudist_steps{a=1} 3",
        "cpudist_steps one",
        "cpudist_steps",
        f'cpudist_steps{{a="{"x" * 9000}"}} 1',
        "",
        "process_open_fds 3",
    ],
)
def test_what_is_no_page_of_a_rank_is_refused(text):
    whole = f"{WHO}{text}" if text.startswith(("h", "c")) else text
    with pytest.raises(cpudist.ProtocolError):
        Samples(whole)


def test_texts_of_labels_are_read_and_what_is_no_number_is_left_out():
    found = Samples(WHO + 'a{t="x\\"y\\\\z\\n,}",u=""} 2e3 1700000000\nb NaN\n\n# c\n')
    assert found.total("a", t='x"y\\z\n,}') == 2000
    assert not found.has("b")


@contextlib.contextmanager
def answering(answer):
    """A port where every link is given to ``answer``."""
    ending = threading.Event()

    def serve():
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                return
            with link, contextlib.suppress(OSError):
                answer(link, ending)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            ending.set()
            server.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)


def says(head, body=b"", times=1):
    """Answers with this, the body so many times."""

    def answer(link, ending):
        link.recv(4096)
        link.sendall(head)
        for _ in range(times):
            if ending.is_set():
                return
            link.sendall(body)

    return answer


def silent(link, ending):
    ending.wait(PATIENCE_S)


def drips(link, ending):
    """A byte now and then, each in time."""
    link.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while not ending.wait(0.05):
        link.sendall(b"#")


GOOD = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "error", "words", "limit_s"),
    [
        (silent, cpudist.OperationTimeoutError, "no page within 0.3 s", 0.3),
        (drips, cpudist.OperationTimeoutError, "no page within 0.3 s", 0.3),
        (says(GOOD, b"#" * 65536, 10**9), cpudist.ProtocolError, "8 MiB", PATIENCE_S),
        (
            says(b"HTTP/1.0 200 OK\r\nContent-Length: 999999999999\r\n\r\n", b"#\n"),
            cpudist.ProtocolError,
            "ends after 2 of 999999999999 bytes",
            PATIENCE_S,
        ),
        (says(b"220 smtp\r\n"), cpudist.ProtocolError, "not speak HTTP", PATIENCE_S),
        (
            says(b"HTTP/1.0 404 no\r\n\r\n"),
            cpudist.ProtocolError,
            "status '404'",
            PATIENCE_S,
        ),
        (says(b""), cpudist.ProtocolError, "without an answer", PATIENCE_S),
        (says(GOOD, b"\xff\xfe\x00"), cpudist.ProtocolError, "no text", PATIENCE_S),
    ],
)
def test_a_page_has_a_time_and_a_size(answer, error, words, limit_s):
    with answering(answer) as port:
        began = time.monotonic()
        with pytest.raises(error, match=words):
            pages.fetch(Address("127.0.0.1", port), limit_s)
        assert time.monotonic() - began < PATIENCE_S


def test_a_page_is_there_once_it_has_come_whole():
    """Who keeps the link open is not waited for."""
    body = (WHO * 3).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)

    def answer(link, ending):
        says(head, body)(link, ending)
        ending.wait(PATIENCE_S)

    with answering(answer) as port:
        found = pages.fetch(Address("127.0.0.1", port), PATIENCE_S)
    assert found.encode() == body


def test_what_a_rank_calls_itself_moves_no_cursor(capsys):
    pytest.importorskip("rich")
    evil = 'cpudist_rank_info{rank="\x1b[2J[red]9",trainer="0",server="-1"} 1\n'
    body = evil.encode()
    with answering(says(GOOD, body)) as port:
        here = [f"127.0.0.1:{port}", "--once", "--interval", "0.01", *PATIENT]
        assert commands.main(here) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "?[2J[red]9 trainer" in said


def test_where_nobody_answers_it_says_so(capsys):
    pytest.importorskip("rich")
    port = free_port()
    here = [f"127.0.0.1:{port}", "--once", "--interval", "0.01"]
    assert commands.main(here) == 1
    said = capsys.readouterr()
    assert f"No rank answers: 127.0.0.1:{port} (Connection refused)" in said.err
    assert "CPUDIST_METRICS=PORT" in said.err
    assert not said.out


def test_without_rich_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_cpudist.top.screen", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert commands.main(["127.0.0.1:9400", "--once"]) == 2
    said = capsys.readouterr().err
    assert "BackendUnavailableError" in said
    assert "extra 'monitor'" in said


@contextlib.contextmanager
def training(port):
    """Two trainers that train until the end, with pages; they have made a step."""
    end, batches = threading.Event(), Batches(2, steps=4)
    begun = [threading.Event(), threading.Event()]
    variables = {**ONE_THREAD, "CPUDIST_METRICS": str(port)}

    def body(context):
        model, optimizer = trainable("async")
        rank = context.trainer_rank
        while not end.is_set():
            for step in range(len(batches)):
                optimizer.zero_grad()
                loss_of(model, batches.part(step, rank)).backward()
                optimizer.step(samples=5)
            begun[rank].set()

    trainers = threading.Thread(
        target=lambda: run_trainers(body, 2, variables=variables)
    )
    trainers.start()
    try:
        for event in begun:
            assert event.wait(PATIENCE_S)
        yield
    finally:
        end.set()
        trainers.join(PATIENCE_S)


def test_a_run_is_shown(capsys, monkeypatch):
    pytest.importorskip("rich")
    pytest.importorskip("prometheus_client")
    port = free_ports(3)
    with training(port):
        text = fetch(port)
        read = {(name, labels): value for name, labels, value in Samples(text)}
        assert read == parsed(text)
        page = text[text.index("# HELP cpudist_rank_info") :]
        printed.check("monitoring", page.replace("bag.weight", "0.weight"))
        places = [Address("127.0.0.1", port + i) for i in range(3)]
        cluster = Cluster(places, PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            shown = cluster.look()
            found = [one.figures.trainer for one in shown[:2]]
            if all(one.steps and one.samples and one.staleness for one in found):
                break
            assert time.monotonic() < deadline, shown
        cluster.close()
        here = [f"127.0.0.1:{port}-{port + 2}", "--interval", "0.2", *PATIENT]
        assert commands.main([*here, "--once"]) == 0
        said = capsys.readouterr().out
        turns = iter([None, None])

        def sleep(_seconds):
            try:
                next(turns)
            except StopIteration:
                raise KeyboardInterrupt from None

        # On a terminal, until Ctrl-C.
        monkeypatch.setattr(commands, "time", SimpleNamespace(sleep=sleep))
        terminal = io.StringIO()
        made = RICH.Console(file=terminal, force_terminal=True, width=140, height=60)
        monkeypatch.setattr("torch_cpudist.top.screen.console", lambda: made)
        assert commands.main(here) == 0
    for page in (said, terminal.getvalue()):
        assert "2 of 3 ranks answer" in page
        assert "Trainers" in page
        assert "Of a second, %" in page
        assert "Servers" in page
        assert f"127.0.0.1:{port + 2}" in page
        assert "Connection refused" in page
    for one, figures_of in zip(shown[:2], found, strict=True):
        assert one.figures.server.rows >= 1
        assert one.figures.server.memory_bytes > 0
        assert figures_of.sent > 0
        assert figures_of.received > 0
        assert figures_of.rows > 0
        assert not figures_of.lost
        assert figures_of.waits.keys() == {"round", "server"}
