# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tables that do not fit are refused on all ranks, before anything is sent."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

import pytest
import starved
import torch
from patience import PATIENCE_S
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.launch import context as contexts
from torch_cpudist.machine import memory
from torch_cpudist.served import progress, room
from torch_cpudist.served.room import Need, Rank
from torch_cpudist.served.set import ParameterSet
from torch_cpudist.testing import ProcessRanks

ROWS, DIM = 3000, 4
LARGE = 1 << 50


class Net(nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.emb = nn.Embedding(rows, DIM, sparse=True)
        self.last = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.emb(ids))


def adagrad(model: nn.Module) -> torch.optim.Adagrad:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def wrap(strategy: Any = None, rows: int = ROWS) -> cpudist.DistributedOptimizer:
    model = Net(rows)
    return cpudist.DistributedOptimizer(adagrad(model), model, strategy)


def need_bytes(strategy: Any = None) -> tuple[int, int]:
    """Per row: what docs/strategies.md says of Adagrad, and the index at its least."""
    record = 16 + 4 * DIM + 4 * DIM
    if isinstance(strategy, cpudist.Geo):
        return 16 + 4 * DIM + 9, 8 + 16 + 4 * DIM
    return record + 9, 8


def plan(monkeypatch: pytest.MonkeyPatch, left: dict[int, int], shared: bool) -> None:
    """What is left on each trainer; on dedicated servers always enough."""

    def limits() -> list[memory.Limit]:
        try:
            rank = contexts.current().trainer_rank
        except cpudist.NotInitializedError:
            rank = -1
        key = "host" if shared else f"host {rank}"
        return [memory.Limit(key, left.get(rank, LARGE), "memory.max of the test")]

    monkeypatch.setattr(memory, "limits", limits)
    monkeypatch.setattr(room, "SMALL_BYTES", 0)


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("strategy", [None, cpudist.Geo(), cpudist.Async()], ids=str)
def test_all_trainers_are_told_and_can_go_on(
    monkeypatch: pytest.MonkeyPatch, short: int, servers: int, strategy: Any
) -> None:
    server_bytes, trainer_bytes = need_bytes(strategy)
    needed = ROWS * trainer_bytes + (0 if servers else ROWS * server_bytes // 2)
    plan(monkeypatch, {short: needed - 1}, shared=False)

    def body(context: cpudist.Context) -> str:
        with pytest.raises(cpudist.OutOfMemoryError) as refused:
            wrap(strategy)
        assert isinstance(refused.value, MemoryError)
        pushed = context.client.stats()["bytes_sent"] if context.client else 0
        assert pushed < ROWS * DIM * 4  # no values travelled
        small = wrap(strategy, rows=50)
        ids = torch.arange(5)
        small.zero_grad()
        small.close()
        assert len(ids) == 5
        return str(refused.value)

    texts = run(body, 2, servers)
    assert texts[0] == texts[1]
    for told in (
        "'emb.weight' of 3000 rows",
        f"{server_bytes} bytes per row on its server and {trainer_bytes} on each",
        f"{needed} bytes for trainer {short}",
        f"there are {needed - 1} (memory.max of the test)",
        "CPUDIST_SERVERS",
    ):
        assert told in texts[0]


def test_what_fits_exactly_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    server_bytes, trainer_bytes = need_bytes()
    needed = ROWS * (server_bytes + 2 * trainer_bytes) // 2 * 2
    # Of one host: two halves of the servers, and two trainers.
    plan(monkeypatch, {0: needed, 1: needed - 5}, shared=True)
    run(lambda _: wrap().close(), 2, 0)
    plan(monkeypatch, {0: needed - 1, 1: needed - 5}, shared=True)

    def refused(_: cpudist.Context) -> None:
        with pytest.raises(cpudist.OutOfMemoryError, match=r"trainer 0 .*, trainer 1"):
            wrap()

    run(refused, 2, 0)


def test_a_dedicated_server_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, {-1: 1000}, shared=False)

    def refused(_: cpudist.Context) -> None:
        with pytest.raises(cpudist.OutOfMemoryError, match="for server 0; there are"):
            wrap()

    run(refused, 2, 1)


def test_trainers_that_differ_are_told_while_they_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan(monkeypatch, {}, shared=False)

    def body(context: cpudist.Context) -> None:
        with pytest.raises(cpudist.ConfigMismatchError):
            wrap(rows=ROWS + context.trainer_rank)

    run(body, 2, 0)


def test_small_tables_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits() -> list[memory.Limit]:
        raise AssertionError("looked at")

    monkeypatch.setattr(memory, "limits", limits)
    run(lambda _: wrap().close(), 1, 0)


def test_sums_go_by_who_shares_a_limit() -> None:
    tables = [Need("small", 10, 2, 1), Need("large", 100, 3, 1)]
    host = memory.Limit("host", 1000, "MemAvailable of the host")
    own = memory.Limit("cgroup/a", 480, "/a/memory.max")
    both = Rank("trainer 0 with server 0", True, True, [host, own])
    other = Rank("trainer 1", True, False, [host])
    assert room.shortage(tables, [both, other], 1) is None
    assert room.shortage(tables, [], 1) is None
    text = room.shortage(tables, [both, both], 1)
    assert text is not None
    assert "'large' of 100 rows and 1 more" in text
    assert "860 bytes for trainer 0 with server 0, trainer 0 with server 0" in text
    assert "480 (/a/memory.max)" in text
    # Of two servers each has half.
    assert room.shortage(tables, [both], 2) is None


def test_what_an_earlier_optimizer_held_counts_as_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers free a set when the last trainer has closed it."""
    monkeypatch.setattr(room, "SMALL_BYTES", 0)
    again = threading.Event()  # trainer 1 wraps once more
    looked = threading.Event()
    early = []
    close = ParameterSet.close
    limits = memory.limits

    def closed(parameters: ParameterSet, tell_servers: bool) -> None:
        if contexts.current().trainer_rank == 0 and not early:
            early.append(looked.wait(0.5))
        close(parameters, tell_servers)

    def look() -> list[memory.Limit]:
        if contexts.current().trainer_rank == 1 and again.is_set():
            looked.set()
        return limits()

    monkeypatch.setattr(ParameterSet, "close", closed)
    monkeypatch.setattr(memory, "limits", look)

    def body(_: cpudist.Context) -> None:
        model = Net()
        inner = adagrad(model)
        cpudist.DistributedOptimizer(inner, model)
        if contexts.current().trainer_rank == 1:
            again.set()
        cpudist.DistributedOptimizer(inner, model)

    run(body, 2)
    assert early == [False]
    assert looked.is_set()


# -- memory that is not there


@pytest.mark.processes
@pytest.mark.parametrize("checked", [True, False])
def test_memory_that_is_not_there(checked: bool) -> None:
    # A process that has freed nothing: what it has freed would do.
    with ProcessRanks(starved.checked if checked else starved.unchecked, 1) as ranks:
        (text,) = ranks.results(PATIENCE_S)
    if checked:
        assert f"'emb.weight' of {starved.ROWS} rows" in text
        assert "(ulimit -v)" in text
    else:
        assert "kind run store of trainer 0: it has no memory left" in text


# -- progress


def test_progress_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    monkeypatch.setattr(progress, "TOLD_BYTES", 0)
    monkeypatch.setattr("torch_cpudist.served.set.RUN_BYTES", 1024 * 4 * DIM)

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]

    def waiting() -> list[str]:
        return [line for line in lines() if "waits until trainer 0 has sent" in line]

    def body(context: cpudist.Context) -> None:
        until = time.monotonic() + PATIENCE_S
        while context.trainer_rank == 0 and not waiting():
            assert time.monotonic() < until
            time.sleep(0.01)
        wrap().close()

    with caplog.at_level(logging.INFO, logger="torch_cpudist"):
        run(body, 2, 0, variables={"CPUDIST_LOG": "info"})
    sent = [line for line in lines() if "rows sent to the servers" in line]
    assert [re.findall(r"(\d+) of 3000 rows", line) for line in sent] == [
        ["1024"],
        ["2048"],
        ["3000"],
    ]
    values = ROWS * (8 + 4 * DIM) + 4 * (DIM + 1)
    (line,) = waiting()
    assert line.startswith(f"trainer 1 waits until trainer 0 has sent its {values} ")
    assert "'emb.weight'" in line


def test_progress_is_rare(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([0.0, 1.0, 4.9, 5.1, 6.0, 10.2, 10.3])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, logger="torch_cpudist"):
        sending = progress.Sending("t", 60)
        for rows in (10, 20, 30, 40, 50, 60):
            sending.sent(rows)
    assert [record.getMessage() for record in caplog.records] == [
        "table 't': 30 of 60 rows sent to the servers, 5 s",
        "table 't': 50 of 60 rows sent to the servers, 10 s",
        "table 't': 60 of 60 rows sent to the servers, 10 s",
    ]
