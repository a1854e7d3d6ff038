# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A Slurm of this host alone: its daemons, started by hand, and two nodes."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from patience import PATIENCE_S
from ports import free_port

# Debian's slurm-wlm lets several daemons of nodes be on one host. Nodes are called by
# their addresses, which every resolver knows.
NODES = ("127.0.0.1", "127.0.0.2")
PROGRAMS = (
    *("munged", "slurmctld", "slurmd"),
    *("sbatch", "srun", "scontrol", "sinfo", "scancel"),
)
SETTINGS = """
ClusterName=one
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# More cores than there are: tasks ask for some, and no daemon binds them.
NODE = "NodeName={name} NodeHostname=localhost NodeAddr={name} Port={port} CPUs=64\n"


def paths() -> dict[str, str]:
    """Where the programs are; skips the test without one of them."""
    places = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    found = {name: shutil.which(name, path=places) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt install slurm-wlm munge")
    return {name: path for name, path in found.items() if path is not None}


class SlurmCluster:
    """The daemons of one cluster; ``end`` ends them by number."""

    def __init__(self, folder: Path) -> None:
        """Starts them.

        Args:
            folder: where they may write; a short path, as a socket is in it.
        """
        self._folder = folder
        self._paths = paths()
        self._daemons: list[subprocess.Popen[bytes]] = []
        settings = folder / "slurm.conf"
        settings.write_text(
            SETTINGS.format(folder=folder, user=getpass.getuser(), port=free_port())
            + "".join(NODE.format(name=name, port=free_port()) for name in NODES)
        )
        self.variables = {"SLURM_CONF": str(settings)}
        (folder / "state").mkdir()
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(64))

    def start(self) -> None:
        """Starts the daemons, and waits until both nodes take jobs."""
        own = self._folder
        files = {
            **{"socket": "munge", "key-file": "key", "log-file": "munge.log"},
            **{"pid-file": "munge.pid", "seed-file": "seed"},
        }
        # Forced: it warns of a folder that others cannot look into.
        options = [f"--{option}={own / name}" for option, name in files.items()]
        self._begin("munged", "--foreground", "--force", *options)
        self._until(lambda: (own / "munge").exists(), "munged's socket")
        self._begin("slurmctld", "-D")
        for name in NODES:
            self._begin("slurmd", "-D", "-N", name)
        self._until(
            lambda: self._said("sinfo", "-h", "-N", "-o", "%T") == "idle\nidle",
            "two idle nodes",
        )

    def _begin(self, name: str, *arguments: str) -> None:
        log = self._folder / f"{name}-{len(self._daemons)}.out"
        with log.open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [self._paths[name], *arguments],
                    env=os.environ | self.variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def _said(self, name: str, *arguments: str) -> str:
        done = subprocess.run(
            [self._paths[name], *arguments],
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout.strip()

    def logs(self) -> str:
        """What the daemons have written."""
        files = sorted(self._folder.glob("*.out"))
        return "\n".join(f"{one.name}:\n{one.read_text()}" for one in files)

    def _until(self, condition, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = [one.args for one in self._daemons if one.poll() is not None]
            if ended or time.monotonic() > deadline:
                pytest.fail(f"no {what}; ended: {ended}\n{self.logs()}")
            time.sleep(0.1)

    def end(self) -> None:
        """Ends jobs that still run, then the daemons, those of nodes first."""
        if len(self._daemons) == 2 + len(NODES):
            self._said("scancel", "--user", getpass.getuser())
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
