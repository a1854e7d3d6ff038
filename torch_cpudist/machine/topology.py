# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which cores there are, and how ranks and replicas are dealt disjoint ones.

The affinity mask that a process has is already cut to its cgroup's cpuset by the
kernel; quotas, which are time and not cores, are read by ``host.cores``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from torch_cpudist.errors import ConfigurationError
from torch_cpudist.machine import host

_ROOT = Path("/")
_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, order=True)
class Core:
    """One logical processor. Sorted, those that share a cache lie together.

    Attributes:
        node: its NUMA node.
        package: its socket.
        core: its physical core in the socket, which hyper-threads share.
        number: what the kernel calls it.
    """

    node: int
    package: int
    core: int
    number: int

    @property
    def physical(self) -> tuple[int, int, int]:
        """What hyper-threads of one physical core have in common."""
        return self.node, self.package, self.core


def cpu_list(text: str) -> set[int]:
    """Reads the kernel's form of a set of cores: ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


@functools.cache
def _nodes(root: Path) -> dict[int, int]:
    """The NUMA node of every core; a kernel without NUMA has no such folder."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for folder in (root / _NODES).iterdir():
            name = folder.name.removeprefix("node")
            if folder.name != name and name.isdigit():
                for core in cpu_list((folder / "cpulist").read_text()):
                    found[core] = int(name)
    return found


@functools.cache
def _core(number: int, root: Path) -> Core:
    """Where a core is, which stays so for as long as the machine runs."""
    folder = root / _CPUS / f"cpu{number}" / "topology"
    package = _number(folder / "physical_package_id", 0)
    core = _number(folder / "core_id", number)
    return Core(_nodes(root).get(number, 0), package, core, number)


def read(allowed: Iterable[int], root: Path = _ROOT) -> list[Core]:
    """The cores of a set, in the order of nodes, sockets and physical cores.

    Args:
        allowed: numbers of cores, of an affinity mask say.
        root: the folder that has ``sys``.
    """
    return sorted(_core(number, root) for number in allowed)


def physical_cores(root: Path = _ROOT) -> int:
    """Physical cores this process may use: of its affinity, cut by cgroup quotas.

    Two threads of a computation on one physical core wait for each other's arithmetic:
    they are slower than one.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    whole = {core.physical for core in read(os.sched_getaffinity(0), root)}
    return min(len(whole), host.cores(root))


def _cut(length: int, parts: int) -> list[range]:
    """Cuts a range into runs whose lengths differ by one at most."""
    ends = [length * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def _shares(sizes: Sequence[int], parts: int) -> list[int]:
    """How many parts each node has: one at least, the rest where most cores are."""
    shares = [1] * len(sizes)
    for _ in range(parts - len(sizes)):
        # The node whose parts would be the largest with one more.
        best = max(range(len(sizes)), key=lambda n: (sizes[n] / (shares[n] + 1), -n))
        shares[best] += 1
    return shares


def _deal_node(cores: Sequence[Core], parts: int) -> list[tuple[int, ...]]:
    whole = [list(group) for _, group in groupby(cores, key=lambda c: c.physical)]
    if len(whole) < parts:  # hyper-threads of one core are parted
        whole = [[core] for core in cores]
    return [
        tuple(core.number for i in run for core in whole[i])
        for run in _cut(len(whole), parts)
    ]


def deal(
    cores: Sequence[Core], parts: int, owners: str = "ranks of this host"
) -> list[tuple[int, ...]]:
    """Deals cores to ``parts`` owners, disjoint and of nearly equal number.

    With as many owners as nodes or more each has cores of one node, else whole nodes.
    Hyper-threads of one core stay together where there are enough cores.

    Args:
        cores: as ``read`` returns them.
        parts: how many ranks, or replicas.
        owners: what they are, for messages.

    Raises:
        ConfigurationError: there are more owners than cores.
    """
    if parts > len(cores):
        raise ConfigurationError(
            f"CPUDIST_PIN=1: {parts} {owners} cannot have cores of their own where "
            f"the affinity mask has {len(cores)} (of numbers "
            f"{sorted(core.number for core in cores)}). Start fewer of them, let the "
            "process have more cores, or unset CPUDIST_PIN."
        )
    nodes = [list(group) for _, group in groupby(cores, key=lambda c: c.node)]
    if parts < len(nodes):
        return [
            tuple(core.number for i in run for core in nodes[i])
            for run in _cut(len(nodes), parts)
        ]
    shares = _shares([len(node) for node in nodes], parts)
    return [
        dealt
        for node, share in zip(nodes, shares, strict=True)
        for dealt in _deal_node(node, share)
    ]


def pin_process(cores: Collection[int]) -> None:
    """Binds every thread of this process, and all it will start, to ``cores``."""
    # Twice: a thread that started another one meanwhile was not bound yet.
    for _ in range(2):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), cores)


def pin_thread(cores: Collection[int]) -> None:
    """Binds the calling thread, and all it will start, to ``cores``."""
    os.sched_setaffinity(0, cores)
