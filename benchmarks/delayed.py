# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts on a link with delay, on one machine, where the kernel has no ``netem``.

Each host is a network namespace with a TAP device. A process, this file as a script,
passes Ethernet frames between the devices, each as long after it came as the link's
delay; it is the switch and the cables. It needs the right to make namespaces, and takes
some of a core: about 10 us a frame.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from hosts import INTERFACE, SUBNET, Host, HostsError, run_command

_MTU = 9000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_READY_DEADLINE_S = 30.0


@contextlib.contextmanager
def delayed_hosts(count: int, delay_ms: float) -> Iterator[list[Host]]:
    """Makes ``count`` hosts and removes them afterwards.

    Args:
        count: of hosts, at most 200.
        delay_ms: from one host to another, each way.

    Raises:
        HostsError: a program is missing, or this process may not.
    """
    mark = f"cpudist-{os.getpid()}-d"
    made = [Host(n, f"{mark}{n}", f"{SUBNET}.{n + 1}") for n in range(count)]
    with contextlib.ExitStack() as undo:
        for host in made:
            run_command("ip", "netns", "add", host.namespace)
            undo.callback(run_command, "ip", "netns", "delete", host.namespace)
        names = [host.namespace for host in made]
        link = subprocess.Popen(
            [sys.executable, __file__, str(delay_ms), *names], stdout=subprocess.PIPE
        )
        undo.callback(_end, link)
        _wait_until_ready(link)
        for host in made:
            address = f"{host.address}/24"
            inside = ("ip", "-n", host.namespace)
            run_command(*inside, "address", "add", address, "dev", INTERFACE)
            run_command(*inside, "link", "set", INTERFACE, "mtu", str(_MTU), "up")
            run_command(*inside, "link", "set", "lo", "up")
        yield made


def _end(link: subprocess.Popen[bytes]) -> None:
    link.kill()
    link.wait()
    if link.stdout is not None:
        link.stdout.close()


def _wait_until_ready(link: subprocess.Popen[bytes]) -> None:
    assert link.stdout is not None
    ready, _, _ = select.select([link.stdout], [], [], _READY_DEADLINE_S)
    if not ready or not link.stdout.readline():
        raise HostsError(
            "no TAP devices: expected /dev/net/tun and the right to use it"
        )


def _open_device(namespace: str) -> int:
    """Makes the device of one host; returns its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", INTERFACE.encode(), _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)
        if libc.setns(home, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        return device
    finally:
        os.close(home)
        os.close(there)


class Link:
    """Frames on their way, in the order in which they came."""

    def __init__(self, devices: list[int], delay_s: float) -> None:
        self._devices, self._delay_s = devices, delay_s
        self._poller = select.epoll()
        for device in devices:
            self._poller.register(device, select.EPOLLIN)
        self._places: dict[bytes, int] = {}  # of addresses, by who has sent
        self._flying: deque[tuple[float, int, bytes]] = deque()

    def pass_frames(self) -> None:
        """Takes what has come and delivers what is due, or waits for either."""
        wait = -1.0
        if self._flying:
            # epoll counts in whole milliseconds: a shorter wait is spent asking.
            left = self._flying[0][0] - time.perf_counter()
            wait = max(left - 0.001, 0.0)
        for device, _ in self._poller.poll(wait):
            self._take(device)
        self._deliver()

    def _take(self, device: int) -> None:
        due = time.perf_counter() + self._delay_s
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(device, _MTU + 64)
                self._places[frame[6:12]] = device
                self._flying.append((due, device, frame))

    def _deliver(self) -> None:
        now = time.perf_counter()
        while self._flying and self._flying[0][0] <= now:
            _, came_from, frame = self._flying.popleft()
            known = self._places.get(frame[:6])
            others = [d for d in self._devices if d != came_from]
            for device in others if known is None else [known]:
                # A device that is not up yet, or full, loses the frame as a cable does.
                with contextlib.suppress(OSError):
                    os.write(device, frame)


def main(arguments: list[str]) -> None:
    """Runs the link: a delay in milliseconds, then namespaces."""
    devices = [_open_device(name) for name in arguments[1:]]
    print("ready", flush=True)
    link = Link(devices, float(arguments[0]) / 1000)
    while True:
        link.pass_frames()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main(sys.argv[1:])
