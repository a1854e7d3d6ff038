# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What there is on this machine, as this process sees it."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch_cpudist import _core
from torch_cpudist.backends import ccl_runtime
from torch_cpudist.doctor.beats import latest_wake_s
from torch_cpudist.doctor.echo import Link, time_loopback
from torch_cpudist.errors import Error
from torch_cpudist.machine import host, memory, topology

_ROOT = Path("/")
# Files of which the names begin so are runtimes of OpenMP, and allocators.
OPENMP = ("libgomp", "libiomp5", "libomp")
ALLOCATORS = {
    "libjemalloc": "jemalloc",
    "libtcmalloc": "tcmalloc",
    "libmimalloc": "mimalloc",
}
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
# Of others than this package's, those that change what is found here.
_VARIABLES = ("OMP_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "LD_PRELOAD")
UNLIMITED = -1


@dataclass(frozen=True)
class Facts:
    """What was found; counts and sizes are those that this process may use.

    Attributes:
        host: its name.
        logical_cores: of its affinity mask.
        physical_cores: that these are threads of.
        usable_cores: of the logical ones, what quotas of cgroups leave.
        numa_nodes: that these are of.
        load: programs that wanted a core, mean of the last minute.
        torch_threads: of a process of its own here.
        openmp: files of OpenMP runtimes in this process.
        allocator: ``glibc`` or what is in its place.
        open_files, processes: soft limits, -1 for none.
        open_files_most: the hard one.
        memory: bytes left of each limit, by what it is.
        shared_memory_bytes: size of /dev/shm; 0 if there is none.
        huge_pages: ``always``, ``madvise`` or ``never``; empty if unknown.
        ports_asked: ``CPUDIST_PORTS``, as first and last.
        ports_taken: of these, those that somebody listens on.
        ports_given: first and last that the kernel gives to who asks for any.
        mtu: bytes of a packet, of interfaces that are up, by name.
        loopback: round trip and bandwidth.
        peers: of links to other hosts, by address.
        late_wake_s: by how much a thread woke too late beside those that compute.
        liveness_ms: ``CPUDIST_LIVENESS_MS``.
        instructions: those of a processor's that matter here and are there.
        kernels: vector level that this package runs at.
        oneccl: its release; empty if it is not there.
        torch: its release.
        variables: that change any of this.
    """

    host: str = ""
    logical_cores: int = 1
    physical_cores: int = 1
    usable_cores: int = 1
    numa_nodes: int = 1
    load: float = 0.0
    torch_threads: int = 1
    openmp: tuple[str, ...] = ()
    allocator: str = "glibc"
    open_files: int = UNLIMITED
    open_files_most: int = UNLIMITED
    processes: int = UNLIMITED
    memory: Mapping[str, int] = field(default_factory=dict)
    shared_memory_bytes: int = 0
    huge_pages: str = ""
    ports_asked: tuple[int, int] = (0, 0)
    ports_taken: tuple[int, ...] = ()
    ports_given: tuple[int, int] = (32768, 60999)
    mtu: Mapping[str, int] = field(default_factory=dict)
    loopback: Link | None = None
    peers: Mapping[str, Link] = field(default_factory=dict)
    late_wake_s: float = 0.0
    liveness_ms: int = 3000
    instructions: tuple[str, ...] = ()
    kernels: str = "scalar"
    oneccl: str = ""
    torch: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def loaded(maps: str, beginnings: Iterable[str]) -> tuple[str, ...]:
    """Files in a process whose names begin so, in order, each once.

    Args:
        maps: text of ``/proc/PID/maps``.
        beginnings: of names, which letters do not follow (``libomp`` is not
            ``libompi``).
    """
    found: dict[str, None] = {}
    for line in maps.splitlines():
        path = line.partition("/")[2]
        name = path.rpartition("/")[2]
        for beginning in beginnings:
            rest = name.removeprefix(beginning)
            if rest != name and not rest[:1].isalpha():
                found[f"/{path}"] = None
    return tuple(found)


def instructions(cpuinfo: str) -> tuple[str, ...]:
    """Which of those that matter here ``/proc/cpuinfo`` names."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            there = set(flags.split())
            return tuple(one for one in _INSTRUCTIONS if one in there)
    return ()


def chosen(text: str) -> str:
    """The word in brackets of a file of the kernel: ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def interfaces(root: Path = _ROOT) -> dict[str, int]:
    """Bytes of a packet of every interface that is up, but for loopback."""
    found = {}
    for folder in sorted((root / "sys/class/net").glob("*")):
        size = _text(folder / "mtu").strip()
        up = _text(folder / "operstate").strip() in ("up", "unknown")
        if folder.name != "lo" and up and size.isdigit():
            found[folder.name] = int(size)
    return found


def given_ports(root: Path = _ROOT) -> tuple[int, int]:
    """First and last port that the kernel gives to who asks for any."""
    words = _text(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)


def taken_ports(first: int, last: int) -> tuple[int, ...]:
    """Those of these ports at which something of this host listens."""
    taken = []
    for port in range(first, last + 1) if first else ():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                taken.append(port)
    return tuple(taken)


def _limit(which: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(which)
    return (
        UNLIMITED if soft == resource.RLIM_INFINITY else soft,
        UNLIMITED if hard == resource.RLIM_INFINITY else hard,
    )


def _oneccl() -> str:
    try:
        return ccl_runtime.find().release
    except Error:
        return ""


def _shared_memory(root: Path) -> int:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def gather(
    variables: Mapping[str, str],
    ports: tuple[int, int],
    peers: Mapping[str, Link],
    liveness_ms: int,
    root: Path = _ROOT,
) -> Facts:
    """Reads and measures all that is judged.

    Cost: some 0.7 s, for the loopback and the load; listens on a port of loopback
    meanwhile.

    Args:
        variables: of the environment.
        ports: that servers are to listen on; (0, 0): any.
        peers: links that were timed already.
        liveness_ms: after which a silent process counts as lost.
        root: the folder that has ``proc`` and ``sys``.
    """
    cores = topology.read(os.sched_getaffinity(0), root)
    maps = _text(root / "proc/self/maps")
    allocators = [name for file, name in ALLOCATORS.items() if loaded(maps, [file])]
    files, most_files = _limit(resource.RLIMIT_NOFILE)
    huge = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return Facts(
        host=socket.gethostname(),
        logical_cores=len(cores),
        physical_cores=len({core.physical for core in cores}),
        usable_cores=host.cores(root),
        numa_nodes=len({core.node for core in cores}),
        load=os.getloadavg()[0],
        torch_threads=torch.get_num_threads(),
        openmp=loaded(maps, OPENMP),
        allocator=", ".join(allocators) or "glibc",
        open_files=files,
        open_files_most=most_files,
        processes=_limit(resource.RLIMIT_NPROC)[0],
        memory={limit.what: limit.free_bytes for limit in memory.limits(root)},
        shared_memory_bytes=_shared_memory(root),
        huge_pages=chosen(huge),
        ports_asked=ports,
        ports_taken=taken_ports(*ports),
        ports_given=given_ports(root),
        mtu=interfaces(root),
        loopback=time_loopback(),
        peers=peers,
        late_wake_s=latest_wake_s(),
        liveness_ms=liveness_ms,
        instructions=instructions(_text(root / "proc/cpuinfo")),
        kernels=_core.simd_level(),
        oneccl=_oneccl(),
        torch=torch.__version__,
        variables={
            name: text
            for name, text in sorted(variables.items())
            if name in _VARIABLES or name.startswith("CPUDIST_")
        },
    )
