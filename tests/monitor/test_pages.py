# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pages of metrics: of a run of processes, while ranks wait, and at their ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time

import pytest
from lazily import Lazily
from monitor_cases import (
    DASHBOARD,
    LATER,
    ROOT,
    SAMPLES,
    STEPS,
    asked,
    dashboard_queries,
    fetch,
    free_ports,
    is_free,
    parsed,
    shown_while_training,
    trainable,
    value,
)
from patience import PATIENCE_S
from ports import free_port
from sync_cases import ONE_THREAD, Batches, loss_of
from sync_cases import run as run_trainers

import torch_cpudist as cpudist
from torch_cpudist import testing
from torch_cpudist.monitor import endpoint
from torch_cpudist.monitor.server import MEETING, SERVER, TABLE
from torch_cpudist.monitor.trainer import CLIENT, LOOP, OPTIMIZER, TRAFFIC
from torch_cpudist.monitor.visitors import MOST, Visitors

# Those of a server that the rows of its tables are dealt to.
PARTS = 16
OPEN_PARSER = Lazily("prometheus_client.openmetrics.parser")
# What has no row in the code's lists.
OTHERS = {
    "cpudist_rank_info": "gauge",
    "cpudist_staleness_updates": "histogram",
    "cpudist_staleness_samples": "histogram",
    "cpudist_unread_parts": "gauge",
}


@pytest.fixture(autouse=True)
def _package():
    pytest.importorskip("prometheus_client")


def names():
    """All metrics as they are shown, and their kinds."""
    rows = (*OPTIMIZER, *CLIENT, *TRAFFIC, *LOOP, *SERVER, *MEETING, *TABLE)
    return {row.family(()).shown: row.kind for row in rows} | OTHERS


def later(name):
    """Whether Async alone has none of it."""
    return LATER.search(name) and "memory" not in name


@pytest.fixture(scope="module")
def shown():
    """What a server and two trainers have shown and said."""
    pytest.importorskip("prometheus_client")
    first = free_ports(3)
    variables = {**ONE_THREAD, "CPUDIST_METRICS": str(first)}
    with testing.ProcessRanks(
        shown_while_training, 3, servers=1, variables=variables
    ) as ranks:
        said = [ranks.expect(rank, "report", PATIENCE_S)["value"] for rank in (1, 2)]
        ranks.expect(1, "report", PATIENCE_S)  # that it asks the server
        ranks.signal(0, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        after = [parsed(fetch(first + 1))]
        while not value(after[-1], "cpudist_server_lost"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            after[1:] = [parsed(fetch(first + 1))]
        ranks.expect(1, "report", PATIENCE_S)
        after.append(parsed(fetch(first + 1)))
    pages = [parsed(text) for text in said[0]["pages"]]
    return said, pages, after


@pytest.mark.processes
def test_trainers_show_what_stats_say(shown):
    said, (_, own, other), _ = shown
    stats, after = said[0]["before"], said[0]["after"]
    for page in (own, other):
        assert value(page, "cpudist_steps_total", optimizer="0") == STEPS
        assert value(page, "cpudist_samples_total", optimizer="0") == STEPS * SAMPLES
        assert value(page, "cpudist_loop_samples_total") == STEPS * SAMPLES
        assert value(page, "cpudist_loop_batches_total") == STEPS
        assert value(page, "cpudist_unread_parts") == 0
        assert value(page, "cpudist_server_lost") == 0
        assert not any(name.startswith("cpudist_table_row") for name, _ in page)
    seconds = value(own, "cpudist_loop_seconds_total")
    assert seconds >= value(own, "cpudist_step_seconds_total", optimizer="0") > 0
    assert seconds >= value(own, "cpudist_loop_data_seconds_total") > 0
    for row in (*OPTIMIZER, *CLIENT):
        labels = row.keys if isinstance(row.keys, dict) else {"": row.keys}
        common = {"optimizer": "0"} if row in OPTIMIZER else {}
        for label, key in labels.items():
            top, _, inner = key.partition(".")
            if top not in stats:
                continue
            least, most = stats[top], after[top]
            if inner:
                least, most = least[inner], most[inner]
            name = {row.label: label} if row.label else {}
            found = value(own, row.family(()).shown, **common, **name)
            assert least <= found <= most, row.name
    waits = [
        value(own, "cpudist_wait_seconds_total", of=w) for w in ("round", "server")
    ]
    assert stats["wait_s"] <= sum(waits) * (1 + 1e-9)
    assert sum(waits) <= after["wait_s"] * (1 + 1e-9)
    labels = {"role": "trainer", "trainer": "1", "server": "-1", "trainers": "2"}
    info = dict(next(key[1] for key in other if key[0] == "cpudist_rank_info"))
    assert labels.items() <= info.items()


@pytest.mark.processes
def test_staleness_is_a_histogram_of_all_pushes(shown):
    said, (_, own, _), _ = shown
    ages_said = said[0]["before"]["staleness"]
    pushes = ages_said["pushes"]
    assert 1 <= pushes <= STEPS
    name = "cpudist_staleness_updates"
    assert value(own, f"{name}_count") == pushes
    assert value(own, f"{name}_sum") == pytest.approx(pushes * ages_said["steps_mean"])
    zero = value(own, f"{name}_bucket", le="0.0")
    assert zero == ages_said["steps"].get("0", 0)
    assert value(own, f"{name}_bucket", le="4095.0") == pushes


@pytest.mark.processes
def test_a_server_shows_its_load_and_its_tables(shown):
    _, (server, own, other), _ = shown
    # Of a busy trainer several steps travel as one push.
    assert 2 <= value(server, "cpudist_server_pushes_total") <= 2 * STEPS
    assert value(server, "cpudist_server_trainers", state="seen") == 2
    assert value(server, "cpudist_server_trainers", state="lost") == 0
    assert value(server, "cpudist_server_trainers", state="present") == 2
    assert value(server, "cpudist_table_rows", table="bag.weight", set="0") == 30
    assert value(server, "cpudist_table_bytes", table="bag.weight", set="0") > 30 * 16
    rows = [value(page, "cpudist_rows_total", how="pushed") for page in (own, other)]
    assert all(row > 0 for row in rows)
    for direction in ("sent", "received"):
        assert value(server, "cpudist_server_bytes_total", direction=direction) > 1000
    assert not any(name.startswith("cpudist_steps") for name, _ in server)
    # By parts of the keys, and by table on the wire: a key and its row are 24 bytes.
    table = {"table": "bag.weight", "set": "0"}
    pushed = value(server, "cpudist_table_pushed_rows_total", **table)
    fullest = value(server, "cpudist_table_fullest_part_rows_total", **table)
    assert PARTS * fullest >= pushed > fullest > 0
    assert pushed <= sum(rows)
    for page, own_rows in ((own, rows[0]), (other, rows[1])):
        wire = {
            way: value(page, "cpudist_table_wire_bytes_total", direction=way, **table)
            for way in ("sent", "received")
        }
        pulled = value(page, "cpudist_rows_total", how="pulled")
        assert 16 * pulled <= wire["received"]
        assert 0 < wire["sent"] <= 24 * own_rows + 8 * pulled + 1024 * STEPS
        for way, count in wire.items():
            assert count < value(page, "cpudist_bytes_total", direction=way)


@pytest.mark.processes
def test_pages_are_in_the_other_format_too(shown):
    said, (_, own, _), _ = shown
    families = list(OPEN_PARSER.text_string_to_metric_families(said[0]["open"]))
    found = {sample.name for family in families for sample in family.samples}
    assert {name for name, _ in own} <= found


@pytest.mark.processes
def test_what_is_shown_is_documented_and_the_dashboard_asks_for_nothing_else(shown):
    _, pages, _ = shown
    there = {
        re.sub("_(bucket|sum|count)$", "", name) for page in pages for name, _ in page
    }
    own = {name for name in there if name.startswith("cpudist_")}
    assert own == {name for name in names() if not later(name)}
    page = (ROOT / "docs" / "monitoring.md").read_text()
    documented = dict(
        re.findall(r"^- `(cpudist_\w+)(?:\{[^`]*\})?`:\s+(\w+)\.", page, re.M)
    )
    assert documented == names()
    asked = set()
    for expression in dashboard_queries():
        found = re.findall(r"\b(?:cpudist|process)_\w+", expression)
        assert found, expression
        asked.update(re.sub("_(bucket|sum|count)$", "", name) for name in found)
    assert asked <= set(names()) | {
        name for name in there if name.startswith("process")
    }
    variables = re.findall(
        r"cpudist_\w+", json.dumps(json.loads(DASHBOARD.read_text())["templating"])
    )
    assert set(variables) == {"cpudist_rank_info"}


@pytest.mark.processes
def test_it_answers_while_a_server_is_frozen_and_when_it_is_lost(shown):
    _, (_, own, _), after = shown
    # The trainer was in a call that the server did not answer, which failed then.
    for page in after:
        assert value(page, "cpudist_steps_total", optimizer="0") == STEPS
        assert value(page, "cpudist_unread_parts") == 0
    assert value(after[-1], "cpudist_server_lost") == 1
    waited = [value(page, "cpudist_wait_seconds_total", of="server") for page in after]
    assert waited[-1] > value(own, "cpudist_wait_seconds_total", of="server")


def test_it_answers_while_its_rank_waits_for_another_one():
    port, may = free_ports(2), threading.Event()
    there = [threading.Event(), threading.Event()]
    batches = Batches(2)
    variables = {**ONE_THREAD, "CPUDIST_METRICS": str(port)}

    def body(context):
        model, optimizer = trainable("sync")
        there[context.trainer_rank].set()
        if context.trainer_rank:
            assert may.wait(PATIENCE_S)
        loss_of(model, batches.part(0, context.trainer_rank)).backward()
        optimizer.step()
        return optimizer.stats()["steps"]

    ends = []
    trainers = threading.Thread(
        target=lambda: ends.append(run_trainers(body, 2, variables=variables))
    )
    trainers.start()
    try:
        assert all(one.wait(PATIENCE_S) for one in there)
        # The first trainer is in its step, or about to be, and cannot leave it.
        found = [parsed(fetch(port + rank)) for rank in (0, 1, 0, 1)]
    finally:
        may.set()
        trainers.join(PATIENCE_S)
    assert ends == [[1, 1]]
    for page in found:
        assert value(page, "cpudist_steps_total", optimizer="0") == 0
        assert value(page, "cpudist_unread_parts") == 0


@pytest.mark.processes
def test_a_page_lives_from_init_to_shutdown_and_takes_what_comes():
    port = free_port()
    with alone(port):
        assert asked(port, path="/")[0] == 404
        # Who says nothing keeps nobody waiting; nor do more than are answered at once.
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        assert value(parsed(fetch(port)), "cpudist_unread_parts") == 0
        for one in idle:
            one.close()
        refused = socket.create_connection(("127.0.0.1", port))
        refused.sendall(b"\x00\xff not http\r\n\r\n")
        refused.settimeout(PATIENCE_S)
        while refused.recv(1024):
            pass
        refused.close()
        assert value(parsed(fetch(port)), "process_open_fds") > 0
    assert is_free(port)
    with alone(port):  # the port may be used again at once
        assert "cpudist_rank_info" in fetch(port)


@pytest.mark.processes
def test_who_says_nothing_keeps_nobody_out():
    port = free_port()
    with alone(port), contextlib.ExitStack() as silent:
        links = [
            silent.enter_context(
                socket.create_connection(("127.0.0.1", port), PATIENCE_S)
            )
            for _ in range(3 * MOST)
        ]
        for _ in range(2):
            assert "cpudist_rank_info" in fetch(port)
        assert links[0].recv(1) == b""  # the oldest had to go


def test_of_who_says_nothing_the_oldest_of_the_busiest_host_goes_first():
    cut, now = [], [0.0]
    visitors = Visitors(cut.append, lambda: now[0])
    with contextlib.ExitStack() as made:
        links = [made.enter_context(socket.socket()) for _ in range(MOST + 5)]
        assert visitors.come(links[0], "10.0.0.1")
        assert all(visitors.come(one, "10.0.0.2") for one in links[1:MOST])
        assert not cut
        visitors.asked(links[1])
        assert visitors.come(links[MOST], "10.0.0.3")
        assert cut == [links[2]]
        visitors.go(links[2])  # its thread ends; its place is taken already
        for one in [links[0], *links[3 : MOST + 1]]:
            visitors.asked(one)
        # All are being answered, since a moment ago.
        assert not visitors.come(links[MOST + 1], "10.0.0.4")
        assert cut == [links[2]]
        now[0] = 1.0
        assert visitors.come(links[MOST + 2], "10.0.0.4")
        assert cut == [links[2], links[0]]
        visitors.go(links[1])
        assert visitors.come(links[MOST + 3], "10.0.0.4")
        assert len(cut) == 2


@pytest.mark.processes
def test_who_sends_a_byte_now_and_then_is_cut_off(monkeypatch):
    """Each byte comes in time, the request never: nine would keep all others out."""
    monkeypatch.setattr(endpoint, "CLIENT_S", 1.0)
    port = free_port()
    with alone(port), socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(0.1)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline
            try:
                slow.sendall(b"G")
                if not slow.recv(1):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert "cpudist_rank_info" in fetch(port)


@contextlib.contextmanager
def alone(port):
    """A world of one with a page."""
    yield cpudist.init(variables={**ONE_THREAD, "CPUDIST_METRICS": str(port)})
    cpudist.shutdown()


@pytest.mark.processes
def test_a_forked_child_does_not_keep_the_port():
    port = free_port()
    go, tell = os.pipe()
    there, ready = os.pipe()
    child = 0
    try:
        with alone(port):
            child = os.fork()
            if not child:
                os.close(tell)  # so that the parent's end is the end of the wait
                os.write(ready, b"x")
                os.read(go, 1)
                os._exit(0)
            os.read(there, 1)  # the child is past what it does after the fork
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))  # which a listener elsewhere would refuse
            other.listen()
    finally:
        os.close(tell)
        if child:
            os.waitpid(child, 0)
        for end in (go, there, ready):
            os.close(end)


@pytest.mark.processes
def test_a_taken_port_is_said_at_once_and_nothing_is_left():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(cpudist.AddressError, match=f"port {port}: Address already"):
            cpudist.init(variables={"CPUDIST_METRICS": str(port)})
        with pytest.raises(cpudist.AddressError, match="Cannot assign"):
            cpudist.init(variables={"CPUDIST_METRICS": f"192.0.2.1:{port}"})
    port = free_port()
    with pytest.raises(cpudist.OperationTimeoutError):
        cpudist.init(
            variables={"CPUDIST_METRICS": str(port)},
            rank=0,
            world_size=2,
            store=testing.HashStore(),
            timeout_s=0.1,
        )
    assert is_free(port)
