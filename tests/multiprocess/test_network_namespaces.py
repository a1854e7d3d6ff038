# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every command line of docs/launch.md for several hosts, between two namespaces.

The namespaces have the page's addresses and share nothing but a virtual cable: no
loopback, no unix sockets. That is what separates hosts for this package.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess

import launch_page
import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
EXAMPLES = [name for name in launch_page.examples() if name.startswith("hosts-")]


def ip(*arguments):
    command = ["ip", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode != 0:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts():
    """Two network namespaces with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("the program ip (iproute2) is missing: no network namespaces")
    names = [f"cpudist-{os.getpid()}-{side}" for side in "ab"]
    ends = [f"cpud{os.getpid() % 100000}{side}" for side in "ab"]
    with contextlib.ExitStack() as undo:
        try:
            for name in names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "delete", name)
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end, address in zip(names, ends, ADDRESSES, strict=True):
                ip("link", "set", end, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield names


def test_the_page_has_every_layout():
    assert set(EXAMPLES) == {
        "hosts-colocated",
        "hosts-dedicated",
        "hosts-roles",
        "hosts-c10d",
        "hosts-ports",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_command_line(name, hosts, launch, tmp_path):
    example = launch_page.examples()[name]
    (tmp_path / "train.py").write_text(launch_page.script())
    programs = [
        launch(["ip", "netns", "exec", host, "bash", "-c", command])
        for host, command in zip(hosts, example.commands, strict=True)
    ]
    launch_page.check_outcome(example, programs, 90)


def test_servers_listen_only_where_the_others_come_from(hosts, launch, tmp_path):
    (tmp_path / "look.py").write_text(
        "import torch_cpudist as c; c.init(); print(open('/proc/net/tcp').read(), "
        "flush=True); "
        "c.barrier(); c.shutdown()"
    )
    command = (
        "torchrun --nnodes=2 --node-rank={} --nproc-per-node=1 --master-addr=10.77.0.1 "
        "--master-port=29500 look.py"
    )
    programs = [
        launch(["ip", "netns", "exec", host, "bash", "-c", command.format(rank)])
        for rank, host in enumerate(hosts)
    ]
    for rank, started in enumerate(programs):
        assert started.wait(90) == 0, started.text()
        rows = [line.split() for line in started.text().splitlines() if ": " in line]
        listening = {
            row[1].split(":")[0] for row in rows if len(row) > 3 and row[3] == "0A"
        }
        own = "".join(
            f"{int(part):02X}" for part in reversed(ADDRESSES[rank].split("."))
        )
        # torchrun's own store (on the first host only) listens everywhere.
        assert own in listening, started.text()
        assert listening <= {own, "00000000"} if rank == 0 else listening == {own}
