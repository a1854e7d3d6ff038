# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What memory is left, as the kernel's files tell it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from torch_cpudist.machine import memory

MEMINFO = "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\nSwapFree: 50 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def found(root: Path) -> dict[str, int]:
    """What is left, by what it is called, without this process's own limit."""
    limits = [one for one in memory.limits(root) if one.what != "ulimit -v"]
    return {one.what.replace(str(root), ""): one.free_bytes for one in limits}


def test_the_host_counts_page_cache_and_swap_as_there(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    assert found(root) == {"MemAvailable of the host": 4050 * 1024}


def test_version_2_at_every_level_less_what_can_be_taken_back(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    root = write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job/rank\n",
            f"{top}/job/rank/memory.max": "max\n",
            f"{top}/job/rank/memory.current": "700\n",
            f"{top}/job/memory.max": "1000\n",
            f"{top}/job/memory.current": "900\n",
            f"{top}/job/memory.stat": "anon 500\ninactive_file 300\nactive_file 100\n",
            f"{top}/job/memory.swap.max": "20\n",
            f"{top}/job/memory.swap.current": "5\n",
        },
    )
    limits = found(root)
    assert limits.pop("MemAvailable of the host")
    assert limits == {f"/{top}/job/memory.max": 1000 - (900 - 400) + 15}


def test_version_1_and_a_path_of_the_host_in_a_container(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n1:name=s:/\n",
            f"{top}/memory.limit_in_bytes": "5000\n",
            f"{top}/memory.usage_in_bytes": "4500\n",
            f"{top}/memory.stat": "cache 9\ntotal_inactive_file 1500\n",
            f"{top}/docker/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            f"{top}/docker/memory.usage_in_bytes": "1\n",
        },
    )
    assert found(root) == {f"/{top}/memory.limit_in_bytes": 2000}


def test_processes_that_see_one_cgroup_at_two_paths_share_it(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    limit = {"memory.max": "1000\n", "memory.current": "900\n"}
    host = write(
        tmp_path / "host",
        {"proc/self/cgroup": "0::/job\n"}
        | {f"{top}/job/{name}": text for name, text in limit.items()},
    )
    inside = write(tmp_path / "inside", {"proc/self/cgroup": "0::/\n"})
    (inside / "sys/fs").mkdir(parents=True)
    (inside / top).symlink_to(host / top / "job")
    other = write(
        tmp_path / "other",
        {"proc/self/cgroup": "0::/job\n"}
        | {f"{top}/job/{name}": text for name, text in limit.items()},
    )
    (own,), (same,), (apart,) = (memory.limits(root) for root in (host, inside, other))
    assert own.key == same.key != apart.key


def test_nothing_is_said_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert found(tmp_path) == {}
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "many\n"}
    assert found(write(tmp_path, files)) == {}


def test_this_process_has_a_host_and_its_own_limit() -> None:
    before = {one.what: one for one in memory.limits()}
    assert before["MemAvailable of the host"].free_bytes > 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        pytest.skip("this process may not lift its limit again")
    used = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize")
    )
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
        own = next(one for one in memory.limits() if one.what == "ulimit -v")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert own.key.endswith(f"/{os.getpid()}")
    assert abs(own.free_bytes - (1 << 30)) < 256 << 20
