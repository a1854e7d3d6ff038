# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Two hosts with a cable between them: network namespaces of this one.

Needs the program ip and the right to make them; a test without is skipped by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from patience import PATIENCE_S

ADDRESSES = ("10.78.0.1", "10.78.0.2")
NEW_ADDRESS = "10.78.0.3"  # of the second host, see ``mend_for_new``
_NOBODY = "02:00:00:00:00:99"
_NEW_NETWORK = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=PATIENCE_S, capture_output=True)


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces with a cable between them, which has these two ends."""

    names: tuple[str, str]
    ends: tuple[str, str]

    def pull_the_plug(self) -> None:
        """Nothing comes from the second host any more, no reset either."""
        ip("-n", self.names[1], "link", "set", self.ends[1], "down")

    def lose_what_goes(self, side: int) -> None:
        """What one host sends to the other goes to nobody; the way back is there."""
        ip("-n", self.names[side], "neighbour", "replace", ADDRESSES[1 - side],
           "lladdr", _NOBODY, "dev", self.ends[side], "nud", "permanent")  # fmt: skip

    def cut(self) -> None:
        """What either sends goes to nobody, and neither is told."""
        for side in (0, 1):
            self.lose_what_goes(side)

    def mend_for_new(self) -> None:
        """After a cut: what the second host connects from now on gets through alone.

        It has another address there. What goes to the one that connections from before
        have goes to nobody, so that nothing that TCP sends again is answered.
        """
        there = ("-n", self.names[1])
        net = f"{NEW_ADDRESS}/24"
        ip(*there, "address", "add", net, "dev", self.ends[1])
        ip(*there, "route", "replace", "10.78.0.0/24", "dev", self.ends[1],
           "src", NEW_ADDRESS)  # fmt: skip
        ip(*there, "neighbour", "delete", ADDRESSES[0], "dev", self.ends[1])

    def mend(self) -> None:
        """As before the cut."""
        for side in (0, 1):
            ip("-n", self.names[side], "neighbour", "delete", ADDRESSES[1 - side],
               "dev", self.ends[side])  # fmt: skip


@pytest.fixture
def make_hosts() -> Iterator[Callable[[], Hosts]]:
    """Makes such hosts, which end with the test."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are not allowed: no program ip")
    with contextlib.ExitStack() as undo:
        made: list[Hosts] = []

        def make() -> Hosts:
            mark = f"{os.getpid() % 100000}{len(made)}"
            one = Hosts((f"cpudist-{mark}a", f"cpudist-{mark}b"),
                        (f"cpl{mark}a", f"cpl{mark}b"))  # fmt: skip
            for name in one.names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("link", "add", one.ends[0], "type", "veth", "peer", "name", one.ends[1])
            for name, end, address in zip(one.names, one.ends, ADDRESSES, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
            made.append(one)
            return one

        try:
            made_first = make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not allowed: {error}")
        spare = [made_first]
        yield lambda: spare.pop() if spare else make()


def enter(names: tuple[str, str], apart: int, rank: int) -> None:
    """Before a rank joins: one is alone on the second host."""
    side = int(rank == apart)
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", names[side]).open() as file:
        if libc.setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["CPUDIST_BIND"] = ADDRESSES[side]
