# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What init() takes from the environment, and what shutdown() gives back."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from ports import free_port
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_cpudist as cpudist
from torch_cpudist.launch.environment import Environment
from torch_cpudist.launch.layout import Layout
from torch_cpudist.launch.torch_threads import TorchThreads
from torch_cpudist.machine import topology


@pytest.fixture
def two_torch_threads():
    """Two torch threads, whatever the process had; restored after the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        with contextlib.suppress(cpudist.NotInitializedError):
            cpudist.shutdown()  # of a test that failed in between
        torch.set_num_threads(before)


@pytest.mark.usefixtures("two_torch_threads")
def test_the_thread_count_is_given_back():
    cpudist.init(variables={"CPUDIST_THREADS": "3"})
    assert torch.get_num_threads() == 3
    cpudist.shutdown()
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_world_of_one_keeps_its_threads():
    cpudist.init()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)  # by the script
    cpudist.shutdown()
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two_torch_threads")
def test_a_count_set_by_the_script_is_left_alone():
    cpudist.init(variables={"CPUDIST_THREADS": "3"})
    torch.set_num_threads(1)
    cpudist.shutdown()
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("two_torch_threads")
def test_the_thread_count_is_given_back_when_init_fails():
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        with pytest.raises(cpudist.ConfigurationError, match="rank 2 of 4"):
            cpudist.init(variables={"CPUDIST_THREADS": "3"})
    finally:
        dist.destroy_process_group()
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_torch_threads")
def test_ranks_share_the_cores_of_their_host(monkeypatch):
    monkeypatch.setattr(topology, "physical_cores", lambda: 12)
    hosts = ("a", "a", "a", "b")
    layout = Layout((0, 1, 2, 3), (0, 1, 2, 3), True, hosts)
    for rank, share in ((1, 4), (3, 12)):
        threads = TorchThreads()
        threads.take(Environment(rank=rank, world_size=4), layout)
        assert torch.get_num_threads() == share
        threads.give_back()
        assert torch.get_num_threads() == 2


def test_an_explicit_zero_of_the_environment_wins():
    context = cpudist.init(servers=1, variables={"CPUDIST_SERVERS": "0"})
    assert (context.role, context.server_count) == ("trainer", 1)
    context.shutdown()


def test_the_role_of_torchrun_wins():
    launched = {"RANK": "0", "WORLD_SIZE": "1", "ROLE_NAME": "trainer"}
    for argument in ({"role": "server"}, {"servers": 5}):
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with pytest.raises(cpudist.ConfigurationError, match="1 ranks have --role=tr"):
            cpudist.init(**argument, variables=launched)


def test_the_longest_deadlines_overflow_nothing():
    year_ms = str(365 * 24 * 3600 * 1000)
    clocks = ("LIVENESS_MS", "ROUND_DEADLINE_MS", "RPC_DEADLINE_MS")
    variables = {f"CPUDIST_{clock}": year_ms for clock in clocks}
    cpudist.init(variables=variables, timeout_s=365 * 24 * 3600)
    model = torch.nn.Linear(3, 1)
    opt = cpudist.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model
    )
    model(torch.ones(2, 3)).sum().backward()
    opt.step()
    cpudist.barrier()
    assert opt.rounds == 1
    cpudist.shutdown()


SIMD_PROBE = """
import os, torch_cpudist as cpudist
from torch_cpudist import _core
for level in ("foo", "scalar", "later"):
    os.environ["CPUDIST_SIMD"] = level
    try:
        cpudist.init()
        print("level", _core.simd_level())
        cpudist.shutdown()
    except cpudist.ConfigurationError as error:
        print("refused", error)
"""


def test_the_vector_level_is_checked_by_init(launch, tmp_path):
    (tmp_path / "probe.py").write_text(SIMD_PROBE)
    program = launch("python probe.py", CPUDIST_SIMD="foo")
    assert program.wait(PATIENCE_S) == 0, program.text()
    wrong, lowered, late = program.text().splitlines()
    expected = "refused CPUDIST_SIMD: expected scalar, avx2 or avx512, found 'foo'"
    assert wrong.startswith(expected)
    assert lowered == "level scalar"
    assert late.startswith("refused CPUDIST_SIMD='later', but this process runs at")
