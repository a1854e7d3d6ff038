# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Servers and trainers in jobs of their own: what dies is missed by nobody else."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train_groups.py")
TIME_S = 90.0


@pytest.fixture
def groups(launch):
    """Starts torchrun jobs that meet at one port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start(role, name, ranks=1, steps=0, pause_s=0.0, restarts=0, **variables):
        return launch(
            f"torchrun --standalone --nproc-per-node={ranks} --max-restarts={restarts} "
            f"{SCRIPT} {name} {steps} {pause_s}",
            CPUDIST_ROLE=role,
            CPUDIST_RENDEZVOUS=f"127.0.0.1:{port}",
            CPUDIST_THREADS="1",
            **variables,
        )

    return start


def wait_for(path, length, program):
    """Until a file is there and so long; fails with the program's output."""
    until = time.monotonic() + TIME_S
    while not (path.exists() and len(path.read_text()) >= length):
        assert program.process.poll() is None, program.text()
        assert time.monotonic() < until, program.text()
        time.sleep(0.01)
    return path.read_text()


def values_in(text):
    found = re.search(r"is trainer (\d+): \[(.*)\]", text)
    assert found, text
    return int(found[1]), [int(v) for v in found[2].split(",")]


def test_a_killed_trainer_rejoins_and_nobody_else_notices(groups, tmp_path):
    """Every step that a trainer saw applied is in the result, once; and no other."""
    servers = groups("server", "s", ranks=2, CPUDIST_TRAINERS="2")
    steady = groups("trainer", "steady", steps=150, pause_s=0.02)
    victim = groups("trainer", "victim", steps=60, pause_s=0.02, restarts=2)
    wait_for(tmp_path / "victim.steps", 10, victim)
    wait_for(tmp_path / "steady.steps", 1, steady)
    pid = int((tmp_path / "victim.pid").read_text())
    before = len((tmp_path / "steady.steps").read_text())
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    done = len((tmp_path / "victim.steps").read_text())
    wait_for(tmp_path / "victim.steps", done + 1, victim)
    assert int((tmp_path / "victim.pid").read_text()) != pid
    rejoined_s = time.monotonic() - killed_s
    for program in (steady, victim, servers):
        assert program.wait(TIME_S) == 0, program.text()
    # Starting a process takes what it takes; nobody waited for it meanwhile.
    assert len((tmp_path / "steady.steps").read_text()) > before
    assert rejoined_s < 30
    results = {}
    for program in (steady, victim):
        trainer, values = values_in(program.text())
        results[trainer] = values
    last = max(results.values(), key=lambda values: values[-1])
    assert last[-1] >= 150 + 60
    # A step that was applied but not written down before the kill, at most.
    assert last[-1] <= 150 + 60 + 1
    assert sum(last[:8]) == last[-1]
    assert "PeerLost" not in steady.text()


def test_trainers_come_late_and_leave_early(groups, tmp_path):
    servers = groups("server", "s", CPUDIST_TRAINERS="1")
    first = groups("trainer", "first", steps=200, pause_s=0.02)
    wait_for(tmp_path / "first.steps", 5, first)
    second = groups("trainer", "second", ranks=1, steps=5)
    assert second.wait(TIME_S) == 0, second.text()
    assert first.wait(TIME_S) == 0, first.text()
    assert servers.wait(TIME_S) == 0, servers.text()
    trainer, values = values_in(first.text())
    assert trainer == 0
    assert values == [200, 5, 0, 0, 0, 0, 0, 0, 205]


def test_a_killed_server_ends_every_trainer_with_its_name(groups, tmp_path):
    servers = groups("server", "s", ranks=2, CPUDIST_TRAINERS="2")
    trainers = [groups("trainer", n, steps=9999, pause_s=0.01) for n in ("a", "b")]
    for name, program in zip("ab", trainers, strict=True):
        wait_for(tmp_path / f"{name}.steps", 3, program)
    victim = next(
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        == str(servers.process.pid)
        and b"train_groups" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    for program in trainers:
        until = killed_s + 30
        while "PeerLostError" not in program.text():
            assert time.monotonic() < until, program.text()
            time.sleep(0.01)
        assert re.search(r"PeerLostError: server \d \(.*pid", program.text())
        assert program.wait(TIME_S) != 0


def test_a_trainer_without_servers_says_where_it_looked(groups, monkeypatch):
    alone = groups("trainer", "a", steps=1, CPUDIST_TRAINERS="x")
    assert alone.wait(TIME_S) != 0
    assert "CPUDIST_TRAINERS='x': expected a whole number" in alone.text()
