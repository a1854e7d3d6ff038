# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ports to listen at that nobody else is given between the choice and the use."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
from pathlib import Path

# Below what Linux gives to those who ask for any port (from 32768 on, as it is shipped)
# and below the defaults of launchers. Each worker of a run of tests has its own.
FIRST = 16_000
WORKERS = 16
SPAN = 700

# Two runs on one machine begin at different places.
_turns = itertools.count(os.getpid())
_choosing = threading.Lock()


def free_port() -> int:
    """A port of this host at which nobody listens, another one at every call.

    To be asked for right before it is used.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST + worker % WORKERS * SPAN
    with _choosing:
        for turn in itertools.islice(_turns, SPAN):
            port = first + turn % SPAN
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.bind(("", port))
                return port
    raise OSError(f"none of the {SPAN} ports from {first} on is free")


def listens(port):
    """The addresses that this process's network listens on at a port."""
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            place, state = line.split()[1], line.split()[3]
            address, _, at = place.partition(":")
            if state == "0A" and int(at, 16) == port:
                words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                raw = struct.pack(f"={len(words)}I", *words)
                found.add(socket.inet_ntop(family, raw))
    return found
