# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Starts programs, ends them and all below them; what tests say of their time."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    # Of others, by which a process is one of several.
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_ID",
    "PET_NNODES",
    "TRAINING_ROLE",
    # By which a line and its end are written one after the other: the lines of ranks
    # that share a pipe would be mixed.
    "PYTHONUNBUFFERED",
)


def clean_environment():
    """os.environ without launcher's and package's variables; the package importable."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if name not in LAUNCHER_VARIABLES
        and not name.startswith(("CPUDIST_", "TORCHELASTIC_"))
    }
    kept["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), kept.get("PYTHONPATH")])
    )
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept


def skip_without_oneccl():
    """Only where oneCCL is not installed: what is there must work."""
    try:
        importlib.metadata.version("oneccl-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("oneCCL is not installed: the extra ccl")


def descendants(pid):
    """Process ids below ``pid``; torchrun's ranks have sessions of their own."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def started(pid):
    """When a process was started, in ticks; -1 if it is not there any more."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return -1


def check_quick(call, limit_s, tries=5):
    """A call is done in time; beside other processes one of several tries is enough."""
    took_s = []
    while not took_s or (min(took_s) >= limit_s and len(took_s) < tries):
        began = time.monotonic()
        call()
        took_s.append(time.monotonic() - began)
    assert min(took_s) < limit_s, took_s


class Program:
    """One started command line; its output goes to a file, so that no pipe can fill."""

    def __init__(self, command, folder, environment, log):
        self.log = log
        self._output = log.open("w")
        self.process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            executable="/bin/bash" if isinstance(command, str) else None,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def text(self):
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s):
        """Exit status; fails the test with the output when the time is over."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s:\n{self.text()}")

    def end(self):
        """Ends the program and everything below it, by process id."""
        if self.process.poll() is None:
            # Numbers of those that have ended meanwhile may be others' by then.
            family = [self.process.pid, *descendants(self.process.pid)]
            begun = {pid: started(pid) for pid in family}
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            for pid, ticks in begun.items():
                with contextlib.suppress(ProcessLookupError):
                    if ticks >= 0 and started(pid) == ticks:
                        os.kill(pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)
        self._output.close()


class Launcher:
    """Starts command lines in a folder, and ends whatever still runs of them.

    ``variables``: what their environment has besides, of ``clean_environment()``.
    """

    def __init__(self, folder, variables=None):
        self.folder = folder
        self._environment = clean_environment() | (variables or {})
        self._started = []

    def __call__(self, command, **variables):
        log = self.folder / f"output-{len(self._started)}.txt"
        environment = self._environment | {n: str(v) for n, v in variables.items()}
        program = Program(command, self.folder, environment, log)
        self._started.append(program)
        return program

    def end(self):
        for program in self._started:
            program.end()
