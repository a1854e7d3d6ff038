# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The backend ``ccl``: collectives of oneCCL, on one host and between hosts.

oneCCL is started once per process, with the environment of the process's first group,
and all groups share one thread that calls it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import DebugLevel, PrefixStore, get_debug_level

from torch_cpudist.backends import ccl_runtime
from torch_cpudist.backends.loading import load_c10d
from torch_cpudist.backends.meeting import Meeting
from torch_cpudist.errors import (
    BackendUnavailableError,
    ConfigurationError,
    Error,
    OperationTimeoutError,
)
from torch_cpudist.log import logger
from torch_cpudist.machine import host

NAME = "ccl"
# What oneCCL's processes leave in shared memory, however they end.
_LEFT = re.compile(r"(\d+):\d+:\d+")
_SHARED = Path("/dev/shm")  # noqa: S108
# A file younger than this may be of a process that this one cannot see.
_LEFT_S = 60.0
_MAX_ID = 2**30
# Values of CCL_PROCESS_LAUNCHER that work where torchrun, or nobody, has started ranks.
_LAUNCHERS = ("none", "torchrun")


@dataclass(frozen=True)
class Member:
    """What one rank of a new group tells the others.

    Attributes:
        rank: in the group.
        host_id: equal for ranks that share a host; see ``host.identity``.
        agreed: facts about its process.
    """

    rank: int
    host_id: str
    agreed: dict[str, str]


def _status() -> tuple[int, str]:
    """When this process was started, and where its number is known."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]), os.readlink("/proc/self/ns/pid")


def _asks_for_checks() -> bool:
    debugging = get_debug_level() == DebugLevel.DETAIL
    return debugging or logger.isEnabledFor(logging.DEBUG)


def _member(rank: int, release: str) -> Member:
    started, namespace = _status()
    told = {
        "pid": str(os.getpid()),
        "started": str(started),
        "namespace": namespace,
        "name": socket.gethostname(),
        "release": release,
        "checks": str(int(_asks_for_checks())),
    }
    return Member(rank, host.identity(), told)


def meet(options: Any, release: str) -> tuple[list[Member], int]:
    """Members of the new group by rank, and a number of it that all know."""
    rank, size = options.group_rank, options.group_size
    timeout_s = options.timeout.total_seconds()
    meeting = Meeting(options.store, rank, size, timeout_s)
    try:
        told = meeting.meet(asdict(_member(rank, release)))
    except OperationTimeoutError as error:
        raise OperationTimeoutError(f"ccl: making a group: {error}") from error
    members = [Member(**one) for one in told]
    processes = {(m.host_id, m.agreed["namespace"], m.agreed["pid"]) for m in members}
    if len(processes) < size:
        raise BackendUnavailableError(
            "ccl: several ranks of the group are one process, but oneCCL needs a "
            "process per rank. Start them with torchrun, or use gloo or shm."
        )
    releases = {member.agreed["release"]: member.rank for member in members}
    if len(releases) > 1:
        raise BackendUnavailableError(
            f"ccl: ranks have different releases of oneCCL ({releases}, by rank). "
            "Install the same one on every host."
        )
    return members, meeting.run_id


def _interface(members: Sequence[Member]) -> str | None:
    """The network interface that all members reach; ``None`` leaves it to oneCCL."""
    if len({member.host_id for member in members}) == 1:
        return "lo"
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return name.partition(",")[0]
    address = os.environ.get("MASTER_ADDR", "").strip()
    if not address:
        return None
    port = int(os.environ.get("MASTER_PORT", "1"))
    with contextlib.suppress(ConfigurationError):
        return host.interface_of(host.address_towards(address, port))
    return None


def _names_mean_hosts(members: Sequence[Member]) -> bool:
    """Whether host names tell hosts apart, which oneCCL takes for granted."""
    pairs = {(member.agreed["name"], member.host_id) for member in members}
    return len({name for name, _ in pairs}) == len(pairs)


def settings(rank: int, members: Sequence[Member]) -> dict[str, str]:
    """Variables of oneCCL for a process whose first group has these members."""
    here = [m.rank for m in members if m.host_id == members[rank].host_id]
    shared = len(here) > 1 and _names_mean_hosts(members)
    made = {
        "CCL_ATL_SHM": str(int(shared)),
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_LOCAL_RANK": str(here.index(rank)),
        "CCL_LOCAL_SIZE": str(len(here)),
        "CCL_LOG_LEVEL": "error",
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_WORKER_OFFLOAD": "0",
    }
    name = _interface(members)
    return made if name is None else made | {"FI_TCP_IFACE": name}


def set_environment(made: Mapping[str, str]) -> None:
    """Sets what oneCCL reads from the environment.

    Raises:
        BackendUnavailableError: the transport that is set would need mpirun.
    """
    transport = os.environ.get("CCL_ATL_TRANSPORT", "ofi")
    if transport != "ofi":
        raise BackendUnavailableError(
            f"ccl: CCL_ATL_TRANSPORT={transport}, but without mpirun only ofi works. "
            "Unset it."
        )
    launcher = os.environ.get("CCL_PROCESS_LAUNCHER")
    if launcher is not None and launcher not in _LAUNCHERS:
        # What others read of their launchers is not there under torchrun.
        here = made.get("CCL_PROCESS_LAUNCHER", "none")
        os.environ["CCL_PROCESS_LAUNCHER"] = here
        logger.warning(
            "ccl: CCL_PROCESS_LAUNCHER=%s does not work without mpirun, %s is taken; "
            "unset it",
            launcher,
            here,
        )
    for name, value in made.items():
        os.environ.setdefault(name, value)
    said = ", ".join(f"{name}={os.environ[name]}" for name in sorted(made))
    logger.info("ccl: oneCCL is started with %s", said)


def _is_over(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _remove(folder: Path, is_left: Callable[[int, float], bool]) -> int:
    """Removes this user's files of processes of which ``is_left(pid, age_s)``."""
    removed = 0
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            named = _LEFT.fullmatch(file.name)
            if named is None:
                continue
            with contextlib.suppress(OSError):
                found = file.stat()
                age_s = time.time() - found.st_mtime
                if found.st_uid == os.getuid() and is_left(int(named[1]), age_s):
                    file.unlink()
                    removed += 1
    return removed


def remove_left_files(folder: Path = _SHARED) -> int:
    """Removes what oneCCL's processes left in shared memory when they were killed.

    Returns:
        How many files.
    """
    return _remove(folder, lambda pid, age_s: age_s > _LEFT_S and _is_over(pid))


class _Engines:
    """The one engine of a process, made with its first group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Any = None
        self._peers: set[int] = set()  # processes of this host

    def take(
        self, rank: int, members: Sequence[Member], shim: Path, peers: Sequence[int]
    ) -> Any:
        """The engine; starts oneCCL if this is the process's first group."""
        with self._lock:
            self._peers.update(peers)
            if self._engine is None:
                remove_left_files()
                set_environment(settings(rank, members))
                try:
                    self._engine = load_c10d(NAME).CclEngine(str(shim))
                except Error as error:
                    raise BackendUnavailableError(
                        f"ccl: oneCCL ({shim}): {error}"
                    ) from error
                # Unlike atexit, also at the end of multiprocessing's children.
                Finalize(None, self._end, exitpriority=0)
            return self._engine

    def _end(self) -> None:
        """Ends the engine, and what oneCCL leaves of this process and of dead peers."""
        self._engine.stop()
        own, peers = os.getpid(), self._peers
        _remove(_SHARED, lambda pid, _: pid == own or (pid in peers and _is_over(pid)))


_engines = _Engines()


def check() -> None:
    """Checks, within milliseconds, that the backend can be used here.

    Raises:
        BackendUnavailableError: says what to install.
    """
    load_c10d(NAME)
    ccl_runtime.find()


def create(options: Any, backend_options: Any) -> Any:
    """Makes the backend of one group; torch.distributed calls it. Collective.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        backend_options: ``pg_options`` of the caller; none are known.

    Raises:
        BackendUnavailableError: something is missing, or ranks are not processes.
        OperationTimeoutError: not all ranks came within the group's timeout.
    """
    module = load_c10d(NAME)
    runtime = ccl_runtime.find()
    shim = ccl_runtime.shim(runtime)
    rank = options.group_rank
    members, number = meet(options, runtime.release)
    own = members[rank]
    peers = [
        (m.rank, int(m.agreed["pid"]), int(m.agreed["started"]))
        for m in members
        if m.rank != rank
        and m.host_id == own.host_id
        and m.agreed["namespace"] == own.agreed["namespace"]
    ]
    engine = _engines.take(rank, members, shim, [pid for _, pid, _ in peers])
    return module.create_ccl(
        engine=engine,
        store=PrefixStore(f"{NAME}/{number}", options.store),
        rank=rank,
        size=options.group_size,
        id=number % _MAX_ID,
        timeout_ms=max(1, int(options.timeout / timedelta(milliseconds=1))),
        peers=peers,
        # All of them compare, or none.
        checks=any(member.agreed["checks"] == "1" for member in members),
    )
