# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What facts of a machine mean for a job, and what to set. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from torch_cpudist.doctor.facts import UNLIMITED, Facts

GOOD, HINT, PROBLEM = "good", "hint", "problem"

_LEAST_FILES = 4096
_LEAST_PROCESSES = 1024
_LEAST_MEMORY = _LEAST_SHARED = 1 << 30
_OPENMP = re.compile("lib(iomp5|omp|gomp)[-.]")
_ETHERNET = 1500
_SLOW_LOOPBACK_US, _SLOW_LOOPBACK = 500.0, 500e6
_SLOW_PEER_US, _SLOW_PEER = 1000.0, 110e6
# Shares of the liveness by which a wake may be late: five heartbeats are sent in it, so
# that what takes half of it leaves little.
_LATE, _TOO_LATE = 0.1, 0.5


@dataclass(frozen=True)
class Finding:
    """One judgement.

    Attributes:
        level: ``good``, ``hint`` (may be better) or ``problem`` (mend it first).
        topic: what it is about.
        text: in words, with what to set.
    """

    level: str
    topic: str
    text: str


def judge(facts: Facts) -> list[Finding]:
    """All that there is to say of a machine."""
    parts = [_cores, _threads, _numa, _load, _openmp, _allocator, _limits]
    parts += [_memory, _huge_pages, _ports, _mtu, _links, _liveness, _vectors, _oneccl]
    return [finding for part in parts for finding in part(facts)]


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def usable(facts: Facts) -> int:
    """Cores to compute on: physical ones that quotas leave."""
    return max(1, min(facts.physical_cores, facts.usable_cores))


def _cores(facts: Facts) -> Iterator[Finding]:
    count = usable(facts)
    text = (
        f"{facts.physical_cores} physical cores, {facts.logical_cores} with "
        f"hyper-threads. Ranks x CPUDIST_THREADS (x replicas) should be {count}: "
        f"torchrun --nproc-per-node=N with N up to {count}"
    )
    yield Finding(
        GOOD, "cores", f"{text}; without CPUDIST_THREADS each takes its share."
    )
    if facts.usable_cores < facts.physical_cores:
        yield Finding(
            HINT,
            "cores",
            f"a quota of a cgroup leaves {facts.usable_cores} of "
            f"{facts.physical_cores}: threads beyond it are stopped in mid step. Raise "
            "it (docker --cpus, resources.limits.cpu), or give whole cores (cpuset).",
        )


def _threads(facts: Facts) -> Iterator[Finding]:
    for name in ("OMP_NUM_THREADS", "CPUDIST_THREADS"):
        text = facts.variables.get(name, "").partition(",")[0].strip()
        if text.isdecimal() and int(text) > usable(facts):
            yield Finding(
                PROBLEM,
                "threads",
                f"{name}={text} is more than the {usable(facts)} cores there are: "
                "threads of one core wait for each other. Unset it, or set at most "
                f"{usable(facts)} / ranks of this host.",
            )


def _numa(facts: Facts) -> Iterator[Finding]:
    nodes = facts.numa_nodes
    if nodes < 2:
        yield Finding(GOOD, "NUMA", "one node: all memory is equally far.")
    elif facts.variables.get("CPUDIST_PIN", "0") in ("0", "false"):
        yield Finding(
            HINT,
            "NUMA",
            f"{nodes} nodes: memory of another one is slower. Set CPUDIST_PIN=1 and "
            f"start {nodes} ranks on this host, or a multiple.",
        )
    else:
        yield Finding(GOOD, "NUMA", f"{nodes} nodes, and ranks are pinned.")


def _load(facts: Facts) -> Iterator[Finding]:
    if facts.load > max(1.0, 0.5 * usable(facts)):
        yield Finding(
            PROBLEM,
            "load",
            f"other programs want {facts.load:.1f} cores of {usable(facts)}: steps "
            "wait for their slowest rank. End them, or give the job cores of its own.",
        )


def _preloaded_openmp(facts: Facts, names: Sequence[str]) -> str | None:
    """The runtime of LD_PRELOAD that takes libgomp's calls, too: LLVM's or Intel's."""
    files = re.split("[ :]+", facts.variables.get("LD_PRELOAD", ""))
    loaded = [PurePosixPath(file).name for file in files]
    first = next((name for name in loaded if _OPENMP.match(name)), "")
    others = [name for name in names if name != first]
    takes_over = first.startswith(("libiomp5", "libomp")) and first in names
    only_gomp = all(name.startswith("libgomp") for name in others)
    return first if takes_over and only_gomp else None


def _openmp(facts: Facts) -> Iterator[Finding]:
    names = [PurePosixPath(path).name for path in facts.openmp]
    preloaded = _preloaded_openmp(facts, names)
    if preloaded and len(names) > 1:
        yield Finding(
            GOOD,
            "OpenMP",
            f"{preloaded}, which was preloaded and takes the calls that are meant for "
            "libgomp.",
        )
    elif len(names) > 1:
        yield Finding(
            PROBLEM,
            "OpenMP",
            f"{len(names)} runtimes in one process ({', '.join(names)}): their threads "
            "take each other's cores. Keep one: mend LD_PRELOAD, or the package that "
            "brings the other.",
        )
    elif names:
        yield Finding(GOOD, "OpenMP", f"one runtime, {names[0]}.")


def _allocator(facts: Facts) -> Iterator[Finding]:
    if facts.allocator == "glibc":
        yield Finding(
            HINT,
            "allocator",
            "glibc's, which gives large tensors back to the kernel and takes them "
            "anew. LD_PRELOAD=libjemalloc.so.2 (or libtcmalloc.so.4) may help.",
        )
    else:
        yield Finding(GOOD, "allocator", f"{facts.allocator}.")


def _below(limit: int, least: int) -> bool:
    return limit != UNLIMITED and limit < least


def _limits(facts: Facts) -> Iterator[Finding]:
    if _below(facts.open_files, _LEAST_FILES):
        most = facts.open_files_most
        enough = not _below(most, _LEAST_FILES)
        way = f"Set ulimit -n {_LEAST_FILES if most == UNLIMITED else most}"
        rest = "." if enough else f", and raise the hard limit, which is {most}."
        yield Finding(
            HINT if facts.open_files >= 1024 else PROBLEM,
            "limits",
            f"{facts.open_files} open files: each link, data file and DataLoader "
            f"worker takes some. {way}{rest}",
        )
    else:
        yield Finding(GOOD, "limits", "open files are enough.")
    if _below(facts.processes, _LEAST_PROCESSES):
        yield Finding(
            PROBLEM,
            "limits",
            f"{facts.processes} threads and processes of this user (ulimit -u): a rank "
            f"has some ten beside torch's. Set at least {_LEAST_PROCESSES}.",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    for what, left in facts.memory.items():
        level = PROBLEM if left < _LEAST_MEMORY else GOOD
        text = f"{_size(left)} left ({what})"
        if level == PROBLEM:
            text += (
                ": a rank takes 0.3 GiB before it has a table. Free some, or raise it"
            )
        yield Finding(level, "memory", f"{text}.")
    shared = facts.shared_memory_bytes
    if shared < _LEAST_SHARED:
        yield Finding(
            HINT,
            "memory",
            f"shared memory (/dev/shm) is {_size(shared)}: DataLoader workers and "
            "CPUDIST_BACKEND=shm hand tensors on there. Start the container with "
            "--shm-size=2g or more.",
        )


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    if facts.huge_pages == "never":
        yield Finding(
            HINT,
            "huge pages",
            "never: lookups in large tables miss the address cache. Set "
            "/sys/kernel/mm/transparent_hugepage/enabled to madvise, as root.",
        )
    elif facts.huge_pages:
        yield Finding(GOOD, "huge pages", f"{facts.huge_pages}.")


def _ports(facts: Facts) -> Iterator[Finding]:
    first, last = facts.ports_asked
    if not first:
        yield Finding(
            GOOD,
            "ports",
            "servers take any free port. Behind a firewall set CPUDIST_PORTS, one port "
            "for each server of a host.",
        )
        return
    if facts.ports_taken:
        taken = ", ".join(map(str, facts.ports_taken))
        yield Finding(
            PROBLEM,
            "ports",
            f"of CPUDIST_PORTS={first}-{last} somebody has {taken}. Set others, or "
            "more of them.",
        )
    else:
        yield Finding(GOOD, "ports", f"{first} to {last} are free.")
    low, high = facts.ports_given
    if first <= high and last >= low:
        yield Finding(
            HINT,
            "ports",
            f"the kernel gives ports {low} to {high} to any program, of which some are "
            f"CPUDIST_PORTS={first}-{last}. Set lower ones.",
        )


def _mtu(facts: Facts) -> Iterator[Finding]:
    small = {name: size for name, size in facts.mtu.items() if size < _ETHERNET}
    for name, size in small.items():
        yield Finding(
            HINT,
            "MTU",
            f"{name} sends packets of {size} bytes, below Ethernet's {_ETHERNET}: an "
            "overlay or a tunnel. If hosts have another way, set CPUDIST_BIND to it.",
        )
    if facts.mtu and not small:
        sizes = ", ".join(f"{name} {size}" for name, size in facts.mtu.items())
        yield Finding(GOOD, "MTU", f"{sizes}.")


def _links(facts: Facts) -> Iterator[Finding]:
    links = dict(facts.peers)
    if facts.loopback is not None:
        links = {"loopback": facts.loopback, **links}
    for name, link in links.items():
        own = name == "loopback"
        most_us, least = (
            (_SLOW_LOOPBACK_US, _SLOW_LOOPBACK) if own else (_SLOW_PEER_US, _SLOW_PEER)
        )
        text = (
            f"{name}: round trip {link.round_trip_us:.0f} us, "
            f"{link.bytes_per_s / 1e6:,.0f} MB/s."
        )
        late, thin = link.round_trip_us > most_us, link.bytes_per_s < least
        if late and own:
            text += " Slow for loopback: other programs have the cores."
        elif late:
            text += " Each lookup and step waits for it: prefetch, and Async or Geo."
        if thin and own:
            text += " Little for loopback: other programs have the cores."
        elif thin:
            text += (
                " Below a gigabit of Ethernet: shorter values on the wire "
                "(Communicator(wire_dtype=)), push_every, or Geo."
            )
        yield Finding(HINT if late or thin else GOOD, "network", text)


def _liveness(facts: Facts) -> Iterator[Finding]:
    late_ms = 1e3 * facts.late_wake_s
    share = late_ms / facts.liveness_ms
    text = (
        f"a thread woke up to {late_ms:.0f} ms late beside busy cores; who is silent "
        f"for {facts.liveness_ms} ms counts as lost"
    )
    if share < _LATE:
        yield Finding(GOOD, "liveness", f"{text}.")
        return
    wanted = 1000 * math.ceil(late_ms / _LATE / 1000)
    yield Finding(
        PROBLEM if share >= _TOO_LATE else HINT,
        "liveness",
        f"{text}, and heartbeats are threads', too. Set CPUDIST_LIVENESS_MS={wanted} "
        "on every rank, or end what has the cores.",
    )


def _vectors(facts: Facts) -> Iterator[Finding]:
    level = HINT if facts.kernels == "scalar" else GOOD
    yield Finding(level, "vectors", f"kernels of this package run at {facts.kernels}.")
    fast = [name for name in facts.instructions if name.endswith("bf16")]
    if fast:
        yield Finding(
            GOOD,
            "bfloat16",
            f"the processor has {', '.join(fast)}: cpudist.optimize(model) is worth a "
            "measurement.",
        )
    else:
        yield Finding(
            HINT,
            "bfloat16",
            "the processor has no instructions for it: stay with float32 in "
            "computations; on the wire bfloat16 still halves bytes.",
        )


def _oneccl(facts: Facts) -> Iterator[Finding]:
    if facts.oneccl:
        yield Finding(
            GOOD, "oneCCL", f"{facts.oneccl}: CPUDIST_BACKEND=ccl may be set."
        )
    elif facts.variables.get("CPUDIST_BACKEND") == "ccl":
        yield Finding(
            PROBLEM,
            "oneCCL",
            "CPUDIST_BACKEND=ccl, and no release of oneCCL that works is installed. "
            "Install this package with its extra ccl, or unset it.",
        )
    else:
        yield Finding(
            GOOD, "oneCCL", "not installed, and not needed: shm and gloo are there."
        )
