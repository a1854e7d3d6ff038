# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ports to listen at that nobody else is given between the choice and the use."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading

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
