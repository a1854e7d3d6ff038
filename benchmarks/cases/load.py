# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A server under more than it can take: too many pushes, strangers, a long run."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from cases import load_worker as worker
from torch_cpudist import _core

COLUMNS = {
    "name": "name",
    "pushes_per_s": "pushes/s",
    "overloaded": "refused",
    "connect_ms": "connect ms",
    "close_s": "closed s",
    "baseline_mb": "idle MB",
    "rss_mb": "RSS MB",
    "limit_mb": "limit MB",
    "verified": "verified",
}
ROWS_PER_PUSH = 16_384
PUSH_BYTES = ROWS_PER_PUSH * (8 + 4 * worker.DIM)
# What the server may hold of pushes, of those that all clients have under way.
PUSHES_IN_CAP = 8
# What it keeps counts too: records, and the most that an index takes.
VALUES_BYTES = worker.ROWS * (16 + 4 * worker.DIM + 24)
# Besides pushes: replies under way, and what the allocator cannot give back.
SLACK_BYTES = 24_000_000
CONNECT_LIMIT_S = 0.1
HANDSHAKE_S = 2.0
CLOSE_LIMIT_S = HANDSHAKE_S + 0.5
# Small pushes: growth between a tenth of the run and its end.
GROWTH_LIMIT_BYTES = 4_000_000
SAMPLE_S = 0.02


class ServerProcess:
    """One server in a process of its own, ended with the block it is used in."""

    def __init__(self, deadline_s: float, **options: Any) -> None:
        command = [sys.executable, worker.__file__, "server", json.dumps(options)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.deadline_s = deadline_s

    def __enter__(self) -> ServerProcess:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], self.deadline_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.__exit__()
            raise ValueError(f"the server did not start within {self.deadline_s:g} s")
        self.address = json.loads(line)[0]
        return self

    def stats(self) -> dict[str, int]:
        """Ends the server and returns its counters."""
        output, _ = self.process.communicate(timeout=self.deadline_s)
        return dict(json.loads(output))

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Pusher(threading.Thread):
    """A client that pulls its rows and pushes ones for them, until told to stop."""

    def __init__(self, rank: int, address: str, begin: threading.Barrier) -> None:
        super().__init__(name=f"pusher {rank}")
        self.rank, self.begin = rank, begin
        self.stopping = threading.Event()
        self.keys = np.random.default_rng(rank).permutation(worker.ROWS)[:ROWS_PER_PUSH]
        self.table = np.zeros((worker.ROWS, worker.DIM), np.float32)
        self.dense = np.zeros(4, np.float32)
        self.pushes = 0
        self.failure: BaseException | None = None
        self.client = _core.Client(
            run_id=worker.RUN_ID,
            trainer_rank=rank,
            trainer_count=begin.parties - 1,
            servers=[[address]],
            liveness_ms=60_000,
        )

    def run(self) -> None:
        try:
            self.client.connect()
            param_set, queued = worker.open_set(
                self.client, self.rank, self.table, self.dense
            )
            self.pull(param_set)
            self.begin.wait()  # all have been answered: the server's idle memory
            self.begin.wait()
            self.push(param_set, queued)
            self.begin.wait()  # all is applied
            if self.rank == 0:
                param_set.leave()
                param_set.pull_all_rows()
                param_set.pull_dense([self.dense.ctypes.data])
            self.client.goodbye()
        except BaseException as error:
            self.failure = error
            self.begin.abort()

    def pull(self, param_set: _core.ParamSet) -> None:
        param_set.pull(0, self.keys.ctypes.data, len(self.keys))

    def push(self, param_set: _core.ParamSet, queued: _core.AsyncPushes) -> None:
        ones = np.ones((ROWS_PER_PUSH, worker.DIM), np.float32)
        table = (0, self.keys.ctypes.data, len(self.keys), ones.ctypes.data)
        while not self.stopping.is_set():
            self.pull(param_set)
            queued.enqueue(
                configs=[worker.SGD],
                parameters=[(0, ones.ctypes.data)],
                tables=[table],
                weights=[self.dense.ctypes.data],
                samples=1,
            )
            self.pushes += 1
        param_set.drain()


def watch(pid: int, end: threading.Event, seen: list[int]) -> None:
    while not end.wait(SAMPLE_S):
        with contextlib.suppress(OSError):
            seen.append(worker.resident_bytes(pid))


def lost_pushes(pushers: list[Pusher]) -> list[str]:
    """Returns in what the final values differ from the sum of all gradients."""
    expected = np.zeros(worker.ROWS)
    for pusher in pushers:
        expected[pusher.keys] -= pusher.pushes
    problems = []
    wrong = int(np.any(pushers[0].table != expected[:, None], axis=1).sum())
    if wrong:
        problems.append(
            f"{wrong} of {worker.ROWS} rows are not minus the sum of pushes"
        )
    total = sum(pusher.pushes for pusher in pushers)
    if not np.all(pushers[0].dense == -total):
        problems.append(f"dense: expected {-total}, found {pushers[0].dense.tolist()}")
    return problems


def join_all(pushers: list[Pusher], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    for pusher in pushers:
        pusher.join(max(0.0, deadline - time.monotonic()))
    for pusher in pushers:
        cause = pusher.failure
        if cause is not None and not isinstance(cause, threading.BrokenBarrierError):
            raise ValueError(f"{pusher.name} failed: {cause}") from cause


def run_overload(args: argparse.Namespace) -> dict[str, Any]:
    """Pushes by all clients at once; the server's memory is bounded, nothing lost."""
    cap_bytes = PUSHES_IN_CAP * PUSH_BYTES
    options = {
        "trainer_count": args.clients,
        "memory_cap_bytes": cap_bytes + VALUES_BYTES,
        "liveness_ms": 60_000,
    }
    with ServerProcess(args.deadline_s, **options) as server:
        # Every client and this thread, which looks at the server in between.
        begin = threading.Barrier(
            args.clients + 1, timeout=args.deadline_s + args.seconds
        )
        pushers = [Pusher(r, server.address, begin) for r in range(args.clients)]
        for pusher in pushers:
            pusher.start()
        seen: list[int] = []
        end = threading.Event()
        pid = server.process.pid
        watcher = threading.Thread(target=watch, args=(pid, end, seen))
        elapsed_s = math.nan
        with contextlib.suppress(threading.BrokenBarrierError):
            begin.wait()
            baseline = worker.resident_bytes(pid)
            watcher.start()
            began = time.monotonic()
            begin.wait()
            time.sleep(args.seconds)
            for pusher in pushers:
                pusher.stopping.set()
            begin.wait()
            elapsed_s = time.monotonic() - began
        for pusher in pushers:
            pusher.stopping.set()
        join_all(pushers, args.deadline_s)
        end.set()
        watcher.join()
        stats = server.stats()
    limit = baseline + cap_bytes + SLACK_BYTES
    total = sum(pusher.pushes for pusher in pushers)
    ages = [pusher.client.stats()["staleness"] for pusher in pushers]
    problems = lost_pushes(pushers)
    if max(seen) > limit:
        problems.append(f"resident memory: {max(seen)} bytes, limit {limit}")
    if stats["pending_bytes"] != 0 or stats["lost"] != 0:
        problems.append(f"left behind: {stats}")
    quarter = max(1, len(seen) // 4)
    return {
        "name": f"{args.clients} clients",
        "pushes_per_s": total / elapsed_s,
        "overloaded": sum(age["overloaded"] for age in ages),
        "merged": sum(age["merged"] for age in ages),
        "baseline_mb": baseline / 1e6,
        "rss_mb": max(seen) / 1e6,
        "rss_quarters_mb": [
            max(seen[i : i + quarter]) / 1e6 for i in range(0, len(seen), quarter)
        ],
        "cap_mb": cap_bytes / 1e6,
        "limit_mb": limit / 1e6,
        "problems": problems,
        "verified": not problems,
    }


def open_silent(address: str, count: int) -> list[socket.socket]:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return [socket.create_connection((host, int(port)), 10.0) for _ in range(count)]


def connect_s(address: str, rank: int) -> float:
    """Returns what a trainer that nobody expected takes to connect and be greeted."""
    client = _core.Client(run_id=worker.RUN_ID, trainer_rank=rank, servers=[[address]])
    began = time.monotonic()
    client.connect()
    took = time.monotonic() - began
    client.goodbye()
    return took


def until_closed(sockets: list[socket.socket], deadline_s: float) -> Iterator[float]:
    """Yields a time for every socket that the server closes."""
    poll = select.poll()
    left = {each.fileno(): each for each in sockets}
    for number in left:
        poll.register(number, select.POLLIN)
    deadline = time.monotonic() + deadline_s
    while left and time.monotonic() < deadline:
        for number, _ in poll.poll(100):
            poll.unregister(number)
            left.pop(number).close()
            yield time.monotonic()
    for each in left.values():
        each.close()


def run_silent(args: argparse.Namespace) -> dict[str, Any]:
    """Strangers that say nothing; trainers connect meanwhile, strangers are closed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with ServerProcess(args.deadline_s, trainer_count=1) as server:
        began = time.monotonic()
        sockets = open_silent(server.address, args.sockets)
        opened = time.monotonic()
        took: list[float] = []
        # Those that begin while no socket can have been closed.
        while len(took) < 20 and time.monotonic() - began < HANDSHAKE_S:
            took.append(connect_s(server.address, 1 + len(took)))
        closed = list(until_closed(sockets, HANDSHAKE_S + 10))
        stats = server.stats()
    problems = []
    if not took:
        problems.append("the sockets were not all open when trainers connected")
    if max(took, default=math.inf) > CONNECT_LIMIT_S:
        problems.append(f"a trainer waited {max(took, default=0):.3f} s to connect")
    last_s = closed[-1] - opened if closed else math.inf
    if len(closed) != args.sockets or last_s > CLOSE_LIMIT_S:
        problems.append(
            f"{len(closed)} of {args.sockets} closed, last after {last_s:.2f} s"
        )
    if stats["connections"] != 0:
        problems.append(f"{stats['connections']} connections left")
    return {
        "name": f"{args.sockets} silent sockets",
        "connect_ms": 1e3 * max(took, default=math.nan),
        "close_s": last_s,
        "problems": problems,
        "verified": not problems,
    }


def run_small(args: argparse.Namespace) -> dict[str, Any]:
    """Many pushes of one trainer: nothing that is kept per push may grow."""
    command = [sys.executable, worker.__file__, "small", str(args.pushes)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=args.deadline_s + args.pushes / 1000,
    )
    if done.returncode != 0:
        raise ValueError(f"{command} ended with status {done.returncode}")
    facts = json.loads(done.stdout)
    resident = facts["resident_bytes"]
    growth = max(resident[1:]) - resident[0]
    problems = []
    if growth > GROWTH_LIMIT_BYTES:
        problems.append(f"resident memory grew by {growth} bytes")
    if facts["applied"] != args.pushes or facts["dense"] != -float(args.pushes):
        problems.append(f"expected {args.pushes} pushes, found {facts}")
    return {
        "name": f"{args.pushes} small pushes",
        "pushes_per_s": args.pushes / facts["elapsed_s"],
        "baseline_mb": resident[0] / 1e6,
        "rss_mb": max(resident) / 1e6,
        "limit_mb": (resident[0] + GROWTH_LIMIT_BYTES) / 1e6,
        "growth_bytes": growth,
        "buckets": facts["buckets"],
        "problems": problems,
        "verified": not problems,
    }


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per load; ``verified`` says whether every bound held."""
    yield run_overload(args)
    yield run_silent(args)
    yield run_small(args)
