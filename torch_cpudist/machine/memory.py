# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How much memory this process can still get, and with whom it shares what is left.

What the kernel would give back when asked (page cache) and swap count as there: a limit
that is exceeded by this account is exceeded.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_cpudist.machine import host

_ROOT = Path("/")
# Limits of version 1 that mean none are about 2^63.
_UNLIMITED = 2**60
_CACHE = ("inactive_file", "active_file", "slab_reclaimable")


@dataclass(frozen=True)
class Limit:
    """One limit of a process.

    Attributes:
        key: equal exactly for processes that share it.
        free_bytes: what is left of it.
        what: for messages.
    """

    key: str
    free_bytes: int
    what: str

    def as_json(self) -> dict[str, Any]:
        """What ``Limit(**...)`` makes it of again."""
        return asdict(self)


def _number(path: Path) -> int | None:
    """The number in a file; ``None`` if there is none, or it says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number, in bytes; kB are converted."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdigit():
                found[words[0]] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return found


def _cgroups(root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of the memory cgroups this process is in, and whether of version 2."""
    top = root / "sys/fs/cgroup"
    seen: set[Path] = set()
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base = top / "memory" if controllers else top
            own = base / path.lstrip("/")
            # In a container the path may be the host's, and the limit at the top.
            for folder in (own, *own.parents):
                if folder not in seen and (folder == base or base in folder.parents):
                    seen.add(folder)
                    yield folder, not controllers


def _left_in(folder: Path, unified: bool, swap_bytes: int) -> int | None:
    """Bytes left of a cgroup's limit; ``None`` if it has none.

    Args:
        folder: of the cgroup.
        unified: version 2.
        swap_bytes: free swap of the host.
    """
    names = ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current")
    if not unified:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "", "")
    limit, used = _number(folder / names[0]), _number(folder / names[1])
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    stat = _fields(folder / "memory.stat")
    prefix = "" if unified else "total_"
    cache = sum(stat.get(prefix + name, 0) for name in _CACHE)
    if unified:
        allowed = _number(folder / names[2])
        if allowed is not None:
            rest = allowed - (_number(folder / names[3]) or 0)
            swap_bytes = min(swap_bytes, max(rest, 0))
    return max(0, limit - max(0, used - cache)) + swap_bytes


def _address_space(root: Path) -> int | None:
    """Bytes left of ``ulimit -v``; ``None`` without one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _fields(root / "proc/self/status").get("VmSize")
    if limit == resource.RLIM_INFINITY or used is None:
        return None
    return max(0, limit - used)


def limits(root: Path = _ROOT) -> list[Limit]:
    """Every limit that this process has, and what is left of each.

    Those of the machine, of the cgroups above the process (version 1 and 2) and of its
    address space. Empty where the kernel does not tell. Cost: a few small files.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    here = host.identity()
    machine = _fields(root / "proc/meminfo")
    swap_bytes = machine.get("SwapFree", 0)
    found = []
    if "MemAvailable" in machine:
        left = machine["MemAvailable"] + swap_bytes
        found.append(Limit(f"host/{here}", left, "MemAvailable of the host"))
    for folder, unified in _cgroups(root):
        rest = _left_in(folder, unified, swap_bytes)
        if rest is not None:
            name = "memory.max" if unified else "memory.limit_in_bytes"
            # Two containers see their own cgroups at one path, one at two.
            about = folder.stat()
            key = f"cgroup/{here}/{about.st_dev}:{about.st_ino}"
            found.append(Limit(key, rest, f"{folder / name}"))
    rest = _address_space(root)
    if rest is not None:
        found.append(Limit(f"process/{here}/{os.getpid()}", rest, "ulimit -v"))
    return found
