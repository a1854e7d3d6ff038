# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Far more ranks, strangers and pushes than a machine is made for.

Takes minutes and gigabytes, so that pytest collects it by its name only:
``scripts/test.sh --long``, or by hand

    python -m pytest -s tests/faults/overloaded.py
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE_S
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.testing import ProcessRanks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(4 * PATIENCE_S)]

ROWS, DIM, IDS = 4_000, 8, 300
STRANGERS = 2_000


class Counted(nn.Module):
    """A step adds one to a row for each id that names it, and to its trainer's part."""

    def __init__(self, trainers: int) -> None:
        super().__init__()
        with cpudist.remote_tables(min_rows=1):
            self.table = nn.Embedding(ROWS, DIM, sparse=True)
            nn.init.zeros_(self.table.weight)
        self.dense = nn.Parameter(torch.zeros(trainers, 64))

    def forward(self, ids: torch.Tensor, rank: int) -> torch.Tensor:
        return -(self.table(ids).sum() + self.dense[rank].sum())


def make(strategy: str) -> tuple[Counted, cpudist.DistributedOptimizer]:
    # A trainer's gradients under Sync count as one of so many.
    trainers = cpudist.trainer_count()
    lr = float(trainers) if strategy == "sync" else 1.0
    model = Counted(trainers)
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return model, cpudist.DistributedOptimizer(inner, model, strategy=strategy)


def step(model: Counted, opt: cpudist.DistributedOptimizer, rank: int) -> None:
    opt.zero_grad()
    model(torch.randint(ROWS, (IDS,)), rank).backward()
    opt.step()


def sums(model: Counted, opt: cpudist.DistributedOptimizer) -> list[float]:
    """What servers have: the sum of a column of all rows, and each trainer's part."""
    cpudist.barrier()  # everybody is through
    opt.flush()
    with torch.no_grad():
        rows = model.table(torch.arange(ROWS))[:, 0].double().sum().item()
    cpudist.barrier()
    return [rows, *model.dense.detach()[:, 0].tolist()]


def steps(strategy: str, count: int, context: cpudist.Context, report: Any) -> Any:
    torch.set_num_threads(1)
    model, opt = make(strategy)
    for _ in range(count):
        step(model, opt, context.trainer_rank)
    return sums(model, opt)


def check_sums(found: list[list[float]], trainers: int, count: int) -> None:
    expected = [float(trainers * count * IDS), *[float(count)] * trainers]
    for values in found:
        assert values == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_twelve_ranks_on_few_cores(strategy):
    """Each trains and serves; nobody is taken for lost."""
    ranks, count = 12, 30
    with ProcessRanks(functools.partial(steps, strategy, count), ranks) as started:
        check_sums(started.results(3 * PATIENCE_S), ranks, count)


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_twenty_servers_and_thirty_trainers(strategy):
    servers, trainers, count = 20, 30, 5
    body = functools.partial(steps, strategy, count)
    with ProcessRanks(body, servers + trainers, servers=servers) as started:
        found = started.results(3 * PATIENCE_S)
    assert found[:servers] == [None] * servers
    check_sums(found[servers:], trainers, count)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def train_beside_strangers(folder: str, context: cpudist.Context, report: Any) -> Any:
    """Steps until it is told to stop; what it made, and that it may open files."""
    torch.set_num_threads(1)
    model, opt = make("async")
    step(model, opt, context.trainer_rank)
    report(sorted(context.addresses()))
    made = 1
    while not Path(folder, "stop").exists():
        step(model, opt, context.trainer_rank)
        made += 1
        if made % 50 == 0:
            Path(folder, f"steps-{context.trainer_rank}").write_text(str(made))
    with contextlib.ExitStack() as held:
        for _ in range(64):
            held.enter_context(open(os.devnull))
    return [made, sums(model, opt)]


def connect(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        link = socket.socket(socket.AF_UNIX)
        link.connect("\0" + rest.partition("#")[0].removeprefix("@"))
        return link
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def read_steps(folder: Path) -> int:
    files = folder.glob("steps-*")
    return sum(int(path.read_text() or 0) for path in files)


def rate(folder: Path, seconds: float) -> float:
    began_s, before = time.monotonic(), read_steps(folder)
    time.sleep(seconds)
    return (read_steps(folder) - before) / (time.monotonic() - began_s)


def test_two_thousand_idle_strangers(tmp_path, eventually):
    """They neither end training nor take its memory and descriptors."""
    needed = STRANGERS + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.fail(f"{needed} open files are needed here: raise ulimit -Hn {hard}")
    body = functools.partial(train_beside_strangers, str(tmp_path))
    with ProcessRanks(body, 2) as ranks, contextlib.ExitStack() as open_links:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
        open_links.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        addresses = ranks.expect(0, "report", PATIENCE_S)["value"]
        ranks.expect(1, "report", PATIENCE_S)
        eventually(lambda: read_steps(tmp_path) > 0, PATIENCE_S, "steps")
        alone = rate(tmp_path, 5)
        before = [resident_bytes(ranks.pid(rank)) for rank in range(2)]
        refused = 0
        for number in range(STRANGERS):
            try:
                link = connect(addresses[number % len(addresses)])
                open_links.enter_context(link)
            except OSError:  # closed before it was taken
                refused += 1
        beside = rate(tmp_path, 5)
        after = [resident_bytes(ranks.pid(rank)) for rank in range(2)]
        (tmp_path / "stop").touch()
        found = ranks.results(PATIENCE_S)
    grown = [now - was for was, now in zip(before, after, strict=True)]
    print(f"steps/s alone {alone:.0f}, beside {STRANGERS} strangers {beside:.0f}")
    print(f"refused at once {refused}, memory grown by {grown} bytes")
    assert refused < STRANGERS // 10, "hardly any stranger came"
    assert max(grown) < 64 << 20
    made = [entry[0] for entry in found]
    for _, values in found:
        assert values == [float(sum(made) * IDS), *[float(count) for count in made]]


SCRIPT = """
import resource
import torch
import torch_cpudist as cpudist
resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
cpudist.init(timeout_s=TIMEOUT_S)
model = torch.nn.Linear(4, 1)
opt = cpudist.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for _ in range(10):
    opt.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
cpudist.shutdown()
print("trained", flush=True)
"""


def run_with_descriptors(limit: int, init_s: float, launch: Any) -> tuple[int, str]:
    path = launch.folder / "few.py"
    text = SCRIPT.replace("FILES", str(limit)).replace("TIMEOUT_S", str(init_s))
    path.write_text(text)
    started = launch(f"torchrun --standalone --nproc-per-node=4 {path}")
    return started.wait(PATIENCE_S), started.text()


def test_four_ranks_train_with_64_descriptors(launch):
    status, text = run_with_descriptors(64, PATIENCE_S, launch)
    assert status == 0, text
    assert text.count("trained") == 4


def test_too_few_descriptors_are_named(launch):
    """At the end of ``init(timeout_s=)``: others may have closed theirs until then."""
    status, text = run_with_descriptors(12, PATIENCE_S / 10, launch)
    assert status != 0
    assert "Too many open files" in text or "ulimit -n" in text, text


def push_at_once(seconds: float, context: cpudist.Context, report: Any) -> Any:
    torch.set_num_threads(1)
    model, opt = make("async")
    until_s, made = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        opt.zero_grad()
        ids = torch.randint(ROWS, (20 * IDS,))
        model(ids, context.trainer_rank).backward()
        opt.step()
        made += 1
    return [made, sums(model, opt)]


def test_pushes_beyond_what_a_server_takes_wait_and_are_all_applied():
    """Its memory stays below the cap and what a process without tables has."""
    trainers, cap_bytes = 8, 3 << 20
    capped = {"CPUDIST_SERVER_MEMORY_CAP_BYTES": str(cap_bytes)}
    body = functools.partial(push_at_once, 15.0)
    highest = 0
    with ProcessRanks(body, trainers + 1, servers=1, variables=capped) as ranks:
        ranks.expect(0, "serving", PATIENCE_S)
        begun = resident_bytes(ranks.pid(0))
        until_s = time.monotonic() + 15
        while time.monotonic() < until_s:
            highest = max(highest, resident_bytes(ranks.pid(0)))
            time.sleep(0.05)
        found = ranks.results(PATIENCE_S)[1:]
    print(f"memory of the server: {begun >> 20} MB, at most {highest >> 20} MB")
    made = [entry[0] for entry in found]
    assert highest - begun < 1.25 * cap_bytes
    for _, values in found:
        expected = [float(sum(made) * 20 * IDS), *[float(count) for count in made]]
        assert values == expected
