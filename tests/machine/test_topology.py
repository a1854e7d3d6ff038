# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Cores and quotas as the kernel tells of them, and how they are dealt."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from patience import PATIENCE_S
from torch._C._distributed_c10d import HashStore

import torch_cpudist as cpudist
from torch_cpudist.launch import environment
from torch_cpudist.launch.layout import Layout
from torch_cpudist.launch.torch_threads import TorchThreads, threads_of
from torch_cpudist.machine import host, topology


def machine(root, nodes, threads=2, per_node=4):
    """Writes what a kernel says of ``nodes`` x ``per_node`` physical cores.

    The hyper-threads of a core have the numbers n and n + half, as usual.
    """
    half = nodes * per_node
    for number in range(half * threads):
        physical = number % half
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{physical // per_node}\n")
        (folder / "core_id").write_text(f"{physical % per_node}\n")
    for node in range(nodes):
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        begin = node * per_node
        runs = [
            f"{begin + half * t}-{begin + half * t + per_node - 1}"
            for t in range(threads)
        ]
        (folder / "cpulist").write_text(",".join(runs) + "\n")
    return set(range(half * threads))


def dealt(root, allowed, parts):
    return [set(own) for own in topology.deal(topology.read(allowed, root), parts)]


def test_lists_of_cores():
    assert topology.cpu_list("0-2,5\n") == {0, 1, 2, 5}
    assert topology.cpu_list("\n") == set()


def test_owners_have_cores_of_one_node(tmp_path):
    everything = machine(tmp_path, nodes=2)
    assert dealt(tmp_path, everything, 1) == [everything]
    assert dealt(tmp_path, everything, 2) == [
        {0, 1, 2, 3, 8, 9, 10, 11},
        {4, 5, 6, 7, 12, 13, 14, 15},
    ]
    # Hyper-threads of one physical core stay together, while there are enough.
    assert dealt(tmp_path, everything, 8) == [{n, n + 8} for n in range(8)]
    assert sorted(map(len, dealt(tmp_path, everything, 16))) == [1] * 16
    for parts in range(1, 17):
        owned = dealt(tmp_path, everything, parts)
        assert len(owned) == parts
        assert sum(map(len, owned)) == len(set().union(*owned))


def test_fewer_owners_than_nodes_have_whole_ones(tmp_path):
    everything = machine(tmp_path, nodes=4, threads=1, per_node=2)
    assert dealt(tmp_path, everything, 2) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert dealt(tmp_path, everything, 3) == [{0, 1}, {2, 3}, {4, 5, 6, 7}]


def test_what_a_cpuset_leaves_is_dealt(tmp_path):
    machine(tmp_path, nodes=2)
    # A node of three cores, one of one: three owners there, one here.
    assert dealt(tmp_path, {0, 1, 2, 5}, 4) == [{0}, {1}, {2}, {5}]
    assert dealt(tmp_path, {0, 1, 2, 5}, 2) == [{0, 1, 2}, {5}]
    with pytest.raises(cpudist.ConfigurationError, match=r"5 ranks .* mask has 4 "):
        dealt(tmp_path, {0, 1, 2, 5}, 5)


def test_a_kernel_that_says_nothing(tmp_path):
    assert dealt(tmp_path, {3, 1, 2, 0}, 2) == [{0, 1}, {2, 3}]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
        ({"sys/fs/cgroup/job/cpu.max": "150000 100000"}, 1),
        ({"sys/fs/cgroup/job/deep/cpu.max": "50000 100000"}, 1),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1,
        ),
    ],
)
def test_quotas_of_cgroups_count(tmp_path, files, cores):
    own = {"proc/self/cgroup": "0::/job/deep\n", **files}
    for name, text in own.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    mask = len(os.sched_getaffinity(0))
    assert host.cores(tmp_path) == min(cores or mask, mask)


@pytest.mark.parametrize(
    ("cores", "ranks", "replicas", "threads"),
    [(16, 1, 1, 16), (16, 4, 1, 4), (16, 4, 2, 2), (16, 3, 2, 2), (2, 4, 2, 1)],
)
def test_threads_fill_the_cores(cores, ranks, replicas, threads):
    assert threads_of(cores, ranks, replicas) == threads


def test_ranks_are_pinned_and_let_go_again():
    mask = os.sched_getaffinity(0)
    ranks = min(2, len(mask))
    layout = Layout(tuple(range(ranks)), tuple(range(ranks)), True, ("here",) * ranks)
    found = []
    started, ended = threading.Event(), threading.Event()

    def other():
        started.set()
        ended.wait(PATIENCE_S)
        others.append(os.sched_getaffinity(0))

    for rank in range(ranks):
        started.clear()
        ended.clear()
        others = []
        thread = threading.Thread(target=other)
        thread.start()
        started.wait(PATIENCE_S)
        threads = TorchThreads()
        made = environment.parse({"CPUDIST_PIN": "1"})
        threads.take(
            environment.Environment(rank=rank, world_size=ranks, pin=made.pin), layout
        )
        ended.set()
        thread.join()
        found.append(os.sched_getaffinity(0))
        assert others == [found[-1]]
        assert threads.cores == len(found[-1]) or ranks == 1
        threads.give_back()
        assert os.sched_getaffinity(0) == mask
    assert set().union(*found) == mask
    assert sum(map(len, found)) == len(mask)


def test_more_ranks_than_cores_cannot_be_pinned():
    ranks = len(os.sched_getaffinity(0)) + 1
    everyone = tuple(range(ranks))
    layout = Layout(everyone, everyone, True, ("here",) * ranks)
    with pytest.raises(
        cpudist.ConfigurationError,
        match=rf"{ranks} ranks of this host .* mask has {ranks - 1} ",
    ):
        TorchThreads().take(
            environment.Environment(rank=0, world_size=ranks, pin=True), layout
        )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 8),
        # Of an executor that there is not: it divides when it is made.
        ({"CPU_NUM": "4"}, 8),
        ({"CPUDIST_THREADS": "3", "CPU_NUM": "4"}, 3),
        ({"CPUDIST_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        # torchrun's.
        ({"OMP_NUM_THREADS": "1"}, 8),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "6,2"}, 6),
        ({"OMP_NUM_THREADS": "some"}, 8),
    ],
)
def test_ranks_share_the_threads_of_a_host(monkeypatch, variables, expected):
    monkeypatch.setattr(topology, "physical_cores", lambda: 16)
    layout = Layout((0, 1), (0, 1), True, ("here", "here"))
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    threads = TorchThreads()
    threads.take(environment.parse({**launched, **variables}), layout)
    try:
        assert torch.get_num_threads() == expected
        assert threads.cores == 8
    finally:
        threads.give_back()


@pytest.mark.parametrize(
    ("variables", "had", "expected"),
    [
        ({}, 2, 2),
        ({}, 64, 16),
        # Somebody wants more than there are.
        ({"OMP_NUM_THREADS": "64"}, 64, 64),
        # Set by the script since.
        ({"OMP_NUM_THREADS": "64"}, 3, 3),
        ({"OMP_NUM_THREADS": "1", "CPU_NUM": "4"}, 1, 1),
        ({"CPUDIST_THREADS": "5", "OMP_NUM_THREADS": "3"}, 3, 5),
    ],
)
def test_a_world_of_one_keeps_what_was_chosen(monkeypatch, variables, had, expected):
    monkeypatch.setattr(topology, "physical_cores", lambda: 16)
    before = torch.get_num_threads()
    torch.set_num_threads(had)
    threads = TorchThreads()
    try:
        threads.take(environment.parse(variables), Layout((0,), (0,), True, ("here",)))
        assert torch.get_num_threads() == expected
    finally:
        threads.give_back()
        assert torch.get_num_threads() == had
        torch.set_num_threads(before)


def test_replicas_share_the_threads_of_a_rank_once_there_is_an_executor(monkeypatch):
    monkeypatch.setattr(topology, "physical_cores", lambda: 8)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        context = cpudist.init(variables={"CPU_NUM": "4"})
        assert (torch.get_num_threads(), context.cores) == (8, 8)
        with cpudist.ReplicaExecutor(model, lambda m, x: m(x).sum(), inner) as executor:
            assert (executor.replicas, executor.num_threads) == (4, 2)
            executor.run(torch.ones(4, 1))
        assert torch.get_num_threads() == 8
    finally:
        cpudist.shutdown()
        torch.set_num_threads(before)


def test_hyper_threads_of_a_core_count_once(monkeypatch, tmp_path):
    everything = machine(tmp_path, nodes=2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: everything)
    assert topology.physical_cores(tmp_path) == 8
    # Both threads of two cores, one of a third.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 8, 1, 9, 2})
    assert topology.physical_cores(tmp_path) == 3
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("200000 100000")
    assert topology.physical_cores(tmp_path) == 2


def test_pinning_is_a_world_of_ones_too():
    mask = os.sched_getaffinity(0)
    context = cpudist.init(
        rank=0,
        world_size=1,
        store=HashStore(),
        variables={"CPUDIST_PIN": "yes", "CPUDIST_THREADS": "1"},
    )
    assert context.cores == topology.physical_cores() <= host.cores()
    cpudist.shutdown()
    assert os.sched_getaffinity(0) == mask


def test_openmp_and_mkl_follow():
    names = ("at::get_num_threads", "omp_get_max_threads", "mkl_get_max_threads")
    context = cpudist.init(variables={"CPUDIST_THREADS": "3"})
    lines = torch.__config__.parallel_info().splitlines()
    context.abort("seen")
    counts = {
        name: int(line.rpartition(" ")[2])
        for line in lines
        for name in names
        if name in line
    }
    assert {"at::get_num_threads", "omp_get_max_threads"} <= counts.keys()
    assert set(counts.values()) == {3}
