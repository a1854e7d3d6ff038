# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""init() and shutdown(): roles, repeated use, threads, the process group, the end."""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE_S
from programs import check_quick
from sync_cases import run as run_trainers
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_cpudist as cpudist
from torch_cpudist.machine.files import deal


@pytest.fixture
def alone():
    """A world of one, shut down after the test."""
    context = cpudist.init()
    yield context
    context.shutdown()


def linear(context_rank=0):
    torch.manual_seed(context_rank)
    model = torch.nn.Linear(3, 1)
    return model, cpudist.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model
    )


def train(model, opt, steps=1):
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        opt.step()


# -- a world of one ----------------------------------------------------------------


def test_world_of_one(alone):
    assert (cpudist.trainer_rank(), cpudist.trainer_count()) == (0, 1)
    assert cpudist.server_count() == 1
    assert cpudist.is_trainer()
    assert not cpudist.is_server()
    assert (alone.role, alone.rank, alone.shard_id) == ("trainer", 0, 0)
    cpudist.barrier()
    assert cpudist.split_files(["b", "a"]) == ["b", "a"]


def test_distributed_just_works_in_a_world_of_one(alone):
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    sampler = torch.utils.data.DistributedSampler(range(4), shuffle=False)
    assert list(sampler) == [0, 1, 2, 3]
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]


def test_init_and_shutdown_again_and_again():
    for _ in range(3):
        context = cpudist.init()
        model, opt = linear()
        assert cpudist.global_step() == 0
        train(model, opt, steps=2)
        assert cpudist.global_step() == 2
        cpudist.shutdown()
        assert context.closed
        assert not dist.is_initialized()
        cpudist.shutdown()  # a second time does nothing


def test_no_socket_and_no_thread_is_left_behind():
    cpudist.init()
    cpudist.shutdown()
    before = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    for _ in range(3):
        cpudist.init()
        model, opt = linear()
        train(model, opt)
        cpudist.shutdown()
    del model, opt
    after = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_init_twice_is_an_error_and_closes_nothing(alone):
    with pytest.raises(cpudist.ConfigurationError, match=r"shutdown\(\) first"):
        cpudist.init()
    cpudist.barrier()


def test_use_before_and_after():
    def body():
        with pytest.raises(cpudist.NotInitializedError, match=r"cpudist\.init\(\)"):
            cpudist.trainer_rank()
        with pytest.raises(cpudist.NotInitializedError):
            linear()
        context = cpudist.init()
        model, opt = linear()
        cpudist.shutdown()
        assert cpudist.trainer_rank() == 0  # knowing the rank needs no servers
        with pytest.raises(cpudist.ClosedError):
            cpudist.barrier()
        with pytest.raises(cpudist.ClosedError):
            train(model, opt)
        with pytest.raises(cpudist.ClosedError):
            context.trainer_client()

    run_in_thread(body)


def run_in_thread(body):
    raised = []

    def run():
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_another_thread_adopts_the_context(alone):
    def body():
        with pytest.raises(cpudist.NotInitializedError):
            cpudist.current()
        with alone:
            assert cpudist.current() is alone
            cpudist.barrier()
        with pytest.raises(cpudist.NotInitializedError):
            cpudist.current()

    run_in_thread(body)
    assert cpudist.current() is alone


def test_serve_on_a_trainer_says_who_serves(alone):
    with pytest.raises(cpudist.ConfigurationError, match="only dedicated servers"):
        cpudist.serve()


# -- the environment of the process ------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
        {"CPUDIST_SERVERS": "1"},
        {"CPUDIST_SERVRS": "1"},
        {"CPUDIST_STRATEGY": "synk"},
        {"CPUDIST_SERVER_THREADS": "100000"},
        {"CPUDIST_ROLE": "server"},
    ],
)
def test_a_wrong_environment_fails_within_a_second(variables, monkeypatch):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)

    def refused():
        with pytest.raises(cpudist.ConfigurationError):
            cpudist.init()

    check_quick(refused, 1.0)
    assert not dist.is_initialized()


def test_log_level_follows_the_environment(monkeypatch):
    monkeypatch.setenv("CPUDIST_LOG", "debug")
    cpudist.init()
    cpudist.shutdown()
    assert logging.getLogger("torch_cpudist").level == logging.DEBUG
    monkeypatch.delenv("CPUDIST_LOG")
    cpudist.init()
    cpudist.shutdown()
    assert logging.getLogger("torch_cpudist").level == logging.WARNING


def test_an_existing_group_of_exactly_the_trainers_is_kept():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        context = cpudist.init()
        assert context.process_group is dist.group.WORLD
        cpudist.shutdown()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_another_existing_group_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        with pytest.raises(
            cpudist.ConfigurationError, match="rank 2 of 4, but it is trainer"
        ):
            cpudist.init()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 0}, "not world_size, store"),
        ({"network": object()}, "also needs rank="),
        ({"timeout_s": 0}, "must be above 0"),
        ({"timeout_s": float("nan")}, "must be above 0"),
        ({"timeout_s": 1e22}, "at most 31536000"),
        ({"timeout_s": "3"}, "expected seconds, found str"),
        ({"rank": 2, "world_size": 2, "store": object()}, "rank=2: must be at most 1"),
        ({"rank": 0, "world_size": 1.5, "store": object()}, "found float"),
        ({"servers": "1"}, "servers='1': expected a whole number, found str"),
        ({"servers": -1}, "servers=-1: must be at least 0"),
        ({"servers": 10**20}, "must be at most 65535"),
        ({"servers": 0, "role": "server"}, "both say who serves"),
        ({"role": "worker"}, "Valid: server, trainer"),
        ({"servers": 1}, "leaves no trainer"),
        ({"server": {"thread": 1}}, "did you mean threads"),
    ],
)
def test_wrong_arguments(arguments, says):
    with pytest.raises(cpudist.ConfigurationError) as caught:
        cpudist.init(**arguments)
    assert says in str(caught.value)


# -- ranks as threads --------------------------------------------------------------


def test_colocated_ranks():
    seen = run_trainers(
        lambda c: (
            c.role,
            c.rank,
            c.trainer_rank,
            c.trainer_count,
            c.server_count,
            c.shard_id,
        ),
        3,
    )
    assert seen == [("trainer", r, r, 3, 3, r) for r in range(3)]


@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_dedicated_servers(trainers, servers):
    def body(context):
        assert context.server is None
        with pytest.raises(cpudist.ConfigurationError):
            cpudist.serve()
        cpudist.barrier()
        return (context.trainer_rank, context.trainer_count, context.server_count)

    seen = run_trainers(body, trainers, servers=servers)
    assert seen == [(rank, trainers, servers) for rank in range(trainers)]


def test_a_trainer_that_ends_early_serves_on():
    def body(context):
        model, opt = linear(context.trainer_rank)
        train(model, opt, steps=2 if context.trainer_rank == 0 else 6)
        return cpudist.global_step()

    assert run_trainers(body, 2) == [2, 6]


def test_files_are_dealt_without_loss_or_repeat():
    files = [f"part-{i}" for i in range(7)]

    shares = run_trainers(lambda context: cpudist.split_files(files), 3)
    assert list(itertools.chain(*shares)) == files
    assert [len(share) for share in shares] == [3, 2, 2]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("abcde", ["abc", "de"]),
        ("abcd", ["ab", "cd"]),
        ("edcba", ["ed", "cb", "a"]),
        ("a", ["a", "", ""]),
        ("", ["", ""]),
    ],
)
def test_shares_are_runs_of_the_list_and_the_first_are_larger(files, expected):
    trainers = range(len(expected))
    found = [deal(list(files), rank, len(expected)) for rank in trainers]
    assert found == [list(share) for share in expected]


def test_files_that_cannot_be_dealt(alone):
    with pytest.raises(cpudist.InvalidArgumentError, match="one path"):
        cpudist.split_files("part-0")
    with pytest.raises(cpudist.InvalidArgumentError, match="'a' is given twice"):
        cpudist.split_files(["a", "b", "a"])
    with pytest.raises(cpudist.InvalidArgumentError, match=r"Pass sorted\(files\)"):
        cpudist.split_files({"a", "b"})


def test_the_first_failure_of_a_rank_is_what_the_test_sees():
    def body(context):
        if context.trainer_rank == 1:
            raise KeyError("only here")
        cpudist.barrier()

    with pytest.raises(KeyError, match="only here") as caught:
        run_trainers(body, 2)
    assert "raised by rank 1 of 2" in caught.value.__notes__


def test_ranks_started_with_different_settings_are_refused():
    store = dist.HashStore()
    caught = []

    def body(rank):
        try:
            cpudist.init(
                rank=rank,
                world_size=2,
                store=store,
                network=None,
                timeout_s=PATIENCE_S,
                variables={"CPUDIST_LIVENESS_MS": str(1000 + rank)},
            )
        except cpudist.ConfigMismatchError as error:
            caught.append(str(error))

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(caught) == 2
    assert "CPUDIST_LIVENESS_MS: 1000 on ranks [0]; 1001 on ranks [1]" in caught[0]


# -- the end of the process --------------------------------------------------------


def test_a_forgotten_shutdown_neither_hangs_nor_complains_alone(launch, tmp_path):
    (tmp_path / "forgets.py").write_text("import torch_cpudist as c\nc.init()\n")
    program = launch("python forgets.py")
    assert program.wait(PATIENCE_S) == 0
    assert program.text() == ""


def test_a_forgotten_shutdown_is_a_loss_to_the_others(launch_forks, tmp_path):
    (tmp_path / "forgets.py").write_text(
        "import os, torch_cpudist as c\n"
        "c.init()\n"
        "tasks = map(int, os.listdir('/proc/self/task'))\n"
        "cores = set()\n"
        "for task in tasks:\n"
        "    try: cores.add(tuple(os.sched_getaffinity(task)))\n"
        "    except ProcessLookupError: pass  # a thread that has ended\n"
        "print(f'rank {c.trainer_rank()} has {cores}.')\n"
        "c.barrier()\n"
        "if c.trainer_rank() == 1: raise SystemExit(0)\n"
        "try: c.shutdown()\n"
        "except c.PeerLostError as error: print('lost:', error)\n"
    )
    mask = os.sched_getaffinity(0)
    pin = int(len(mask) > 1)
    command = "torchrun --standalone --nproc-per-node=2 forgets.py"
    program = launch_forks(command, CPUDIST_PIN=pin)
    assert program.wait(PATIENCE_S) == 0, program.text()
    found = re.findall(r"rank \d has \{\(([\d, ]+)\)\}\.", program.text())
    first, second = ({int(n) for n in re.findall(r"\d+", own)} for own in found)
    assert first | second == mask
    assert not pin or first.isdisjoint(second)
    assert "the other ranks will see trainer 1 as lost" in program.text()
    assert "lost: " in program.text()
