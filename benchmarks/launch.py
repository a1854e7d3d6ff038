# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Starts the processes of one launch, waits with a deadline and ends what is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hosts import INTERFACE, Host
from job import Gate, Job
from peers import PeerSpec

HERE = Path(__file__).resolve().parent
POLL_S = 0.05
GRACE_S = 5.0
PROBE_DEADLINE_S = 120.0
LOG_TAIL_LINES = 25
LIVENESS_MS = 3000  # the default, which a slower clock stretches
MASTER_PORT = 29671  # on hosts of their own nobody else has it

Report = dict[str, Any]


class LaunchError(Exception):
    """A launch failed; the message ends with the tail of its output."""


class ProcessId(NamedTuple):
    """A process id with its start time: ids are reused, the pair is not."""

    pid: int
    started: int


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def descendants(root: int) -> list[ProcessId]:
    """Returns ``root`` and the processes below it; torchrun's are in other groups."""
    parents: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = _stat(int(entry.name))
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
                started[int(entry.name)] = int(fields[19])
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        if pid in started:
            found.append(ProcessId(pid, started[pid]))
        todo += parents.get(pid, [])
    return found


def _signal(process: ProcessId, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        if int(_stat(process.pid)[19]) == process.started:
            os.kill(process.pid, number)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends ``processes`` and all below them: asked first, killed after a grace time."""
    alive = [p for p in processes if p.poll() is None]
    family = [member for p in alive for member in descendants(p.pid)]
    for process in alive:
        process.terminate()
    limit = time.monotonic() + GRACE_S
    while any(p.poll() is None for p in alive) and time.monotonic() < limit:
        time.sleep(POLL_S)
    for member in family:
        _signal(member, signal.SIGKILL)
    for process in alive:
        process.wait(GRACE_S)


def _rank_of(host: Host, hosts: Sequence[Host]) -> list[str]:
    """Returns what torchrun would put into the environment of a host's only rank."""
    return [
        *(f"RANK={host.number}", f"WORLD_SIZE={len(hosts)}"),
        *(f"GROUP_RANK={host.number}", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"),
        *(f"MASTER_ADDR={hosts[0].address}", f"MASTER_PORT={MASTER_PORT}"),
    ]


def commands(
    spec: PeerSpec, job: Job, path: Path, hosts: Sequence[Host] = ()
) -> list[list[str]]:
    """Returns the command line of every process that is started directly.

    With ``hosts`` each rank of a torchrun job is on one of its own. Where the launcher
    is ``ranks`` each is told what torchrun would tell it: an agent per host would cost
    many hosts of one machine as much memory and time as what they run.
    """
    worker = [str(HERE / "worker.py"), str(path)]
    if hosts and spec.launcher == "ranks":
        return [
            host.command(["env", *_rank_of(host, hosts), sys.executable, *worker])
            for host in hosts
        ]
    if hosts:
        chief = f"--master-addr={hosts[0].address}"
        launcher = ["-m", "torch.distributed.run", f"--nnodes={len(hosts)}", chief]
        launcher += [f"--master-port={MASTER_PORT}", "--nproc-per-node=1"]
        return [
            host.command(
                [sys.executable, *launcher, f"--node-rank={host.number}", *worker]
            )
            for host in hosts
        ]
    if spec.launcher == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        count = f"--nproc-per-node={job.trainers + job.servers}"
        return [[sys.executable, *launcher, count, *worker]]
    count_started = 1 if spec.launcher == "parent" else job.trainers
    return [[sys.executable, *worker, str(rank)] for rank in range(count_started)]


def environment(job: Job, hosts: Sequence[Host] = ()) -> dict[str, str]:
    """Returns the caller's environment with threads and layout fixed.

    Hosts that are namespaces still share memory, which hosts do not: backends that use
    it are left out.
    """
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in outer}
    threads = str(job.threads)
    fixed = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "CPUDIST_THREADS": threads,
        "CPUDIST_SERVERS": str(job.servers),
    }
    if hosts:
        fixed |= {"CPUDIST_BACKEND": "gloo", "GLOO_SOCKET_IFNAME": INTERFACE}
    if job.dilation > 1:
        fixed["CPUDIST_LIVENESS_MS"] = str(round(LIVENESS_MS * job.dilation))
    return {**kept, **fixed}


def _wait(processes: list[subprocess.Popen[bytes]], job: Job) -> str | None:
    """Returns None when all ended well, else what went wrong."""
    limit = time.monotonic() + job.deadline_s
    while True:
        codes = [p.poll() for p in processes]
        if failed := [code for code in codes if code not in (None, 0)]:
            return f"a process ended with {failed[0]}"
        if None not in codes:
            return None
        if time.monotonic() > limit:
            return f"not done after {job.deadline_s:g} s"
        time.sleep(POLL_S)


@contextlib.contextmanager
def running(
    commands: Iterable[Sequence[str]], variables: Mapping[str, str], log_path: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts commands in the folder of their log; what is left at the end is ended."""
    processes: list[subprocess.Popen[bytes]] = []
    with log_path.open("wb") as log:
        try:
            for words in commands:
                processes.append(
                    subprocess.Popen(
                        words,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        cwd=log_path.parent,
                        env=variables,
                        start_new_session=True,
                    )
                )
            yield processes
        finally:
            end(processes)


def launch(spec: PeerSpec, job: Job, hosts: Sequence[Host] = ()) -> list[Report]:
    """Runs one launch in fresh processes and returns a report per trainer.

    Args:
        spec: the row.
        job: what the workers are told.
        hosts: one per rank; default: all are on this one.

    Raises:
        LaunchError: a process failed, the deadline passed, or a report is missing.
    """
    Gate.create(job)
    path = job.save()
    log_path = Path(job.run_dir) / "output.txt"
    started = commands(spec, job, path, hosts)
    variables = {**environment(job, hosts), **dict(spec.variables)}
    with running(started, variables, log_path) as processes:
        problem = _wait(processes, job)
    reports = [job.report_path(rank) for rank in range(job.trainers)]
    if problem is None and (missing := [p.name for p in reports if not p.exists()]):
        problem = f"no report {missing}"
    if problem is not None:
        # A trainer's own words, where there are any, say more than its launcher's, and
        # the first of them what the others ended of.
        errors = sorted(
            Path(job.run_dir).glob("error-*.txt"), key=lambda path: path.stat().st_mtime
        )
        text = (errors or [log_path])[0].read_text(errors="replace")
        tail = text.splitlines()[-LOG_TAIL_LINES:]
        raise LaunchError("\n    ".join([f"{job.name}: {problem}", *tail]))
    return [json.loads(p.read_text()) for p in reports]


@contextlib.contextmanager
def run_folder() -> Any:
    """Yields a folder for one launch, removed afterwards."""
    folder = tempfile.mkdtemp(prefix="cpudist-bench-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def missing_reason(spec: PeerSpec) -> str | None:
    """Returns why a peer cannot run here, or None when all it requires imports.

    In a process of its own: a broken binary may not take the runner with it.
    """
    if not spec.requires:
        return None
    command = [sys.executable, str(HERE / "worker.py"), "--probe", *spec.requires]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"import {' '.join(spec.requires)}: not done in {PROBE_DEADLINE_S:g} s"
    if done.returncode == 0:
        return None
    said = done.stdout.strip() or f"import ended with {done.returncode}"
    return f"{said.splitlines()[-1]}; to have it: {spec.install}"
