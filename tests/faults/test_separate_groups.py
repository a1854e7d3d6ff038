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
    """Every step that a trainer saw applied is in the result, once; and no other.

    Meanwhile a third trainer comes late and leaves early.
    """
    servers = groups("server", "s", ranks=2, CPUDIST_TRAINERS="2")
    steady = groups("trainer", "steady", steps=100_000, pause_s=0.02)
    victim = groups("trainer", "victim", steps=40, pause_s=0.02, restarts=2)
    wait_for(tmp_path / "victim.steps", 10, victim)
    wait_for(tmp_path / "steady.steps", 1, steady)
    pid = int((tmp_path / "victim.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    late = groups("trainer", "late", steps=5)
    for program in (victim, late):
        assert program.wait(TIME_S) == 0, program.text()
    assert int((tmp_path / "victim.pid").read_text()) != pid
    assert steady.process.poll() is None, steady.text()
    (tmp_path / "stop").touch()
    for program in (steady, servers):
        assert program.wait(TIME_S) == 0, program.text()
    seen = len((tmp_path / "steady.steps").read_text())
    trainers = {values_in(p.text())[0] for p in (steady, victim, late)}
    assert trainers == {0, 1, 2}
    mine, values = values_in(steady.text())
    assert values[mine] == seen
    # A step that was applied but not written down before the kill, at most.
    assert values[1 - mine] in (40, 41)
    assert values[2] == 5
    assert sum(values[:8]) == values[8]
    assert "PeerLost" not in steady.text()


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


def test_a_killed_trainer_ends_the_others_under_sync(groups, tmp_path):
    """Rounds wait for exactly the trainers of the start."""
    sync = {"CPUDIST_STRATEGY": "sync"}
    servers = groups("server", "s", CPUDIST_TRAINERS="2", **sync)
    victim, other = (
        groups("trainer", n, steps=9999, pause_s=0.01, **sync) for n in ("a", "b")
    )
    for name, program in (("a", victim), ("b", other)):
        wait_for(tmp_path / f"{name}.steps", 3, program)
    os.kill(int((tmp_path / "a.pid").read_text()), signal.SIGKILL)
    assert other.wait(TIME_S) != 0
    assert re.search(r"PeerLostError: trainer \d \(.*pid", other.text()), other.text()
    # Dead is not done: the servers wait for CPUDIST_REJOIN_S.
    assert servers.process.poll() is None, servers.text()
