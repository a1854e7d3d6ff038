# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""CPU time, memory and bytes of processes, as the kernel counts them (Linux)."""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

TCP_INFO_SIZE_BYTES = 512
# Offset of tcpi_bytes_sent in struct tcp_info (linux/tcp.h, since Linux 4.19).
TCP_BYTES_SENT_OFFSET = 200


def own_cpu_s() -> float:
    """Returns user + system time of all threads of this process."""
    return time.process_time()


def cpu_s(pid: int) -> float:
    """Returns user + system time of process ``pid`` in scheduler ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_ticks() -> tuple[int, int]:
    """Returns how many ticks all cores together were busy, and how many they had."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(word) for word in words]
    idle = ticks[3] + ticks[4]  # idle, and idle while a disk works
    return sum(ticks) - idle, sum(ticks)


def cable_bytes(pid: int | str, interface: str) -> tuple[int, int]:
    """Returns bytes received and sent by ``interface`` where process ``pid`` runs.

    With every header: what the network of that process's namespace has counted.
    """
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            words = counts.split()
            return int(words[0]), int(words[8])
    raise OSError(f"/proc/{pid}/net/dev has no interface {interface}")


def peak_rss_mb(pid: int | str = "self") -> float:
    """Returns the peak resident memory of a process in MB, shared pages included.

    Not ``ru_maxrss``, which a process inherits from the one that started it.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/{pid}/status has no line VmHWM")


def rss_mb() -> float:
    """Returns the present resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def tcp_bytes_sent() -> int:
    """Returns the bytes that the open TCP sockets of this process have sent."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:
            continue  # closed since the folder was listed
        with socket.socket(fileno=copy) as found:
            inet = found.family in (socket.AF_INET, socket.AF_INET6)
            if inet and found.type == socket.SOCK_STREAM:
                info = found.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE_BYTES
                )
                total += struct.unpack_from("<Q", info, TCP_BYTES_SENT_OFFSET)[0]
    return total
