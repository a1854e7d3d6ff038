# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every command line of docs/launch.md for several hosts, between two namespaces.

The namespaces have the page's addresses and share nothing but a virtual cable: no
loopback, no unix sockets. That is what separates hosts for this package.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import subprocess

import launch_page
import pytest
from ahead import ahead
from patience import PATIENCE_S

from torch_cpudist.backends import ccl, shm
from torch_cpudist.errors import BackendUnavailableError

pytestmark = [pytest.mark.processes, pytest.mark.integrations]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
EXAMPLES = [name for name in launch_page.examples() if name.startswith("hosts-")]


def ip(*arguments):
    command = ["ip", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if done.returncode != 0:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")


def make_hosts(number, undo):
    """Two network namespaces with a cable between them; their names."""
    names = [f"cpudist-{os.getpid()}-{number}{side}" for side in "ab"]
    ends = [f"cpud{os.getpid() % 100000}{number}{side}" for side in "ab"]
    for name in names:
        ip("netns", "add", name)
        undo.callback(ip, "netns", "delete", name)
    ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        ip("link", "set", end, "netns", name)
        ip("-n", name, "address", "add", f"{address}/24", "dev", end)
        ip("-n", name, "link", "set", end, "up")
        ip("-n", name, "link", "set", "lo", "up")
    return names


def start_on(hosts, commands, launch):
    return [
        launch(["ip", "netns", "exec", host, "bash", "-c", command])
        for host, command in zip(hosts, commands, strict=True)
    ]


def run_example(name, hosts, launch):
    example = launch_page.examples()[name]
    (launch.folder / "train.py").write_text(launch_page.script())
    programs = start_on(hosts, example.commands, launch)
    launch_page.check_outcome(example, programs)


def look_at_sockets(hosts, launch):
    """What /proc/net/tcp has on both hosts."""
    (launch.folder / "look.py").write_text(
        "import torch_cpudist as c; c.init(); print(open('/proc/net/tcp').read(), "
        "flush=True); "
        "c.barrier(); c.shutdown()"
    )
    command = (
        "torchrun --nnodes=2 --node-rank={} --nproc-per-node=1 --master-addr=10.77.0.1 "
        "--master-port=29500 look.py"
    )
    programs = start_on(hosts, [command.format(rank) for rank in range(2)], launch)
    for started in programs:
        assert started.wait(PATIENCE_S) == 0, started.text()
    return [started.text() for started in programs]


# The default group is of the backend that is named, another of shm.
COLLECTIVES = """
import json, os, sys, torch, torch.distributed as dist
import torch_cpudist as cpudist
from torch_cpudist.backends import shm
# Memory is shared between network namespaces: as hosts these are told by their number.
OPTIONS = shm.Options(host=os.environ["GROUP_RANK"])
cpudist.init()
found = {"rank": dist.get_rank(), "backend": dist.get_backend()}
apart = dist.new_group(backend="shm", pg_options=OPTIONS)
groups = {found["backend"]: None, "shm": apart}
for name, group in groups.items():
    own = torch.arange(50000.0) + dist.get_rank()
    dist.all_reduce(own, group=group)
    parts = [torch.empty(3) for _ in range(4)]
    dist.all_gather(parts, torch.full((3,), float(dist.get_rank())), group=group)
    dist.barrier(group=group)
    right = own.equal(4 * torch.arange(50000.0) + 6)
    found[name] = right and [p[0].item() for p in parts] == [0.0, 1.0, 2.0, 3.0]
found["hosts"] = shm.hosts(apart)
found["interface"] = os.environ.get("FI_TCP_IFACE", "")
sys.stdout.write("FOUND " + json.dumps(found) + "\\n")
cpudist.shutdown()
"""


def own_backends():
    """Those of ours that can be used here, ccl first."""
    with contextlib.suppress(BackendUnavailableError):
        ccl.check()
        return [ccl.NAME, shm.NAME]
    return [shm.NAME]


def run_collectives(hosts, launch):
    """What two ranks on each host found."""
    (launch.folder / "collectives.py").write_text(COLLECTIVES)
    named = "ccl" if "ccl" in own_backends() else "gloo"
    command = (
        f"CPUDIST_BACKEND={named} "
        "torchrun --nnodes=2 --node-rank={} --nproc-per-node=2 "
        "--master-addr=10.77.0.1 --master-port=29500 collectives.py"
    )
    programs = start_on(hosts, [command.format(rank) for rank in range(2)], launch)
    for started in programs:
        assert started.wait(PATIENCE_S) == 0, started.text()
    lines = [line for one in programs for line in one.text().splitlines()]
    return [
        json.loads(line.partition("FOUND ")[2]) for line in lines if "FOUND " in line
    ]


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    """Every launch has two hosts of its own: addresses and ports are the page's."""
    if shutil.which("ip") is None:
        pytest.skip("the program ip (iproute2) is missing: no network namespaces")
    jobs = {
        f"test_command_line[{name}]": functools.partial(run_example, name)
        for name in EXAMPLES
    }
    jobs["test_servers_listen_only_where_the_others_come_from"] = look_at_sockets
    jobs["test_our_backends_sum_between_hosts"] = run_collectives
    with contextlib.ExitStack() as undo:
        try:
            on_hosts = {
                name: functools.partial(job, make_hosts(number, undo))
                for number, (name, job) in enumerate(jobs.items())
            }
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        with ahead(request, tmp_path_factory, on_hosts) as launches:
            yield launches


def test_the_page_has_every_layout():
    assert set(EXAMPLES) == {
        "hosts-colocated",
        "hosts-dedicated",
        "hosts-roles",
        "hosts-c10d",
        "hosts-ports",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_command_line(name, launched, request):
    launched.result(request)


def test_our_backends_sum_between_hosts(launched, request):
    found = launched.result(request)
    ours = own_backends()
    assert sorted(one["rank"] for one in found) == [0, 1, 2, 3]
    for one in found:
        assert all(one[name] is True for name in ours)
        assert one["hosts"] == [[0, 1], [2, 3]]
        if ccl.NAME in ours:
            assert one["backend"] == ccl.NAME
            assert one["interface"].startswith("cpud")


def test_servers_listen_only_where_the_others_come_from(launched, request):
    for rank, text in enumerate(launched.result(request)):
        rows = [line.split() for line in text.splitlines() if ": " in line]
        listening = {
            row[1].split(":")[0] for row in rows if len(row) > 3 and row[3] == "0A"
        }
        own = "".join(
            f"{int(part):02X}" for part in reversed(ADDRESSES[rank].split("."))
        )
        # torchrun's own store (on the first host only) listens everywhere.
        assert own in listening, text
        assert listening <= {own, "00000000"} if rank == 0 else listening == {own}
