# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of a slow network, on one machine: network namespaces behind a switch.

Every host has one cable whose both ends let through so many bits per second, as
``tc tbf`` (token bucket filter) of the kernel does. Needs the right to make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

COMMAND_DEADLINE_S = 30
SUBNET = "10.231.7"
INTERFACE = "eth0"
QUEUE_MS = 50  # what a cable holds back before it drops
# The bucket holds what may pass at once: a timer tick of the kernel at full rate, and
# never less than the largest segment that is handed down in one piece.
TICK_S, LEAST_BURST_BYTES = 0.004, 128 << 10


class HostsError(Exception):
    """Hosts cannot be made here; the message says what is missing."""


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        number: counted from 0.
        namespace: name of its network namespace.
        address: its IPv4 address.
    """

    number: int
    namespace: str
    address: str

    def command(self, words: list[str]) -> list[str]:
        """Returns the command that runs ``words`` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]


def run_command(*words: str) -> None:
    """Runs a command; raises ``HostsError`` with what it said."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
    except OSError as error:
        raise HostsError(f"{words[0]}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip() or f"ended with {done.returncode}"
        raise HostsError(f"{' '.join(words)}: {said}")


def bits_per_s(text: str) -> int:
    """Reads ``1gbit``, ``100mbit`` or ``500kbit``.

    Raises:
        ValueError: it is none of these.
    """
    for unit, factor in (("gbit", 10**9), ("mbit", 10**6), ("kbit", 10**3)):
        number = text.removesuffix(unit)
        if number != text and number.isdigit() and int(number) > 0:
            return int(number) * factor
    raise ValueError(f"expected a rate such as 1gbit or 100mbit, found {text!r}")


def _limit(namespace: str, device: str, rate: str, queue_ms: int) -> None:
    burst_bytes = max(LEAST_BURST_BYTES, int(bits_per_s(rate) / 8 * TICK_S))
    words = ["rate", rate, "burst", f"{burst_bytes}", "latency", f"{queue_ms}ms"]
    run_command("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device,
         "root", "tbf", *words)  # fmt: skip


def _cable(switch: str, host: Host, rate: str, queue_ms: int) -> None:
    """Connects a host with the switch; both directions have the rate."""
    port, name = f"port{host.number}", host.namespace
    run_command("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name",
         INTERFACE, "netns", name)  # fmt: skip
    run_command("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    run_command(
        "ip", "-n", name, "address", "add", f"{host.address}/24", "dev", INTERFACE
    )
    run_command("ip", "-n", name, "link", "set", INTERFACE, "up")
    run_command("ip", "-n", name, "link", "set", "lo", "up")
    _limit(switch, port, rate, queue_ms)
    _limit(name, INTERFACE, rate, queue_ms)


@contextlib.contextmanager
def hosts(count: int, rate: str, queue_ms: int = QUEUE_MS) -> Iterator[list[Host]]:
    """Makes ``count`` hosts and removes them afterwards.

    Args:
        count: of hosts, at most 200.
        rate: of each cable and direction, as ``100mbit``.
        queue_ms: what a cable holds back before it drops.

    Raises:
        HostsError: a program is missing, or this process may not.
        ValueError: the rate is none.
    """
    bits_per_s(rate)
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise HostsError(f"the program {program} (package iproute2) is missing")
    mark = f"cpudist-{os.getpid()}"
    switch = f"{mark}-switch"
    made = [Host(n, f"{mark}-{n}", f"{SUBNET}.{n + 1}") for n in range(count)]
    with contextlib.ExitStack() as undo:
        for namespace in (switch, *(host.namespace for host in made)):
            run_command("ip", "netns", "add", namespace)
            undo.callback(run_command, "ip", "netns", "delete", namespace)
        run_command("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run_command("ip", "-n", switch, "link", "set", "switch", "up")
        for host in made:
            _cable(switch, host, rate, queue_ms)
        yield made
