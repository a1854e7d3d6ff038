# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGTERM: trainers leave, servers have a snapshot saved, and nothing hangs.

Gradients are whole numbers, so that values say whose steps were applied.
"""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import functools
import os
import signal
import time

import pytest
from counting import counted, step, wrapped
from endings import lose_rank
from group_fixtures import groups, steps_of  # noqa: F401
from loss_cases import train_forever
from patience import PATIENCE_S
from return_groups import train as train_and_outlive
from train_groups import MANY, Training

import torch_cpudist as cpudist
from torch_cpudist.snapshot.directory import Directory
from torch_cpudist.snapshot.reading import Snapshot
from torch_cpudist.testing import ProcessRanks

pytestmark = pytest.mark.processes

ASYNC = {"CPUDIST_STRATEGY": "async", "CPUDIST_THREADS": "1"}
# So long that a test that waits for it fails.
LONG_GRACE = {"CPUDIST_GRACE_S": str(int(2 * PATIENCE_S))}
SHORT_GRACE = {"CPUDIST_GRACE_S": "2"}
TRAINED_ON = 7


def error_of(ranks, rank=0):
    return ranks.expect(rank, "error", PATIENCE_S)["value"]


def ended(ranks):
    return ranks.exit_codes(PATIENCE_S)


# -- a trainer ---------------------------------------------------------------------


def queue_for_ever(folder, name, context, report):
    """Pushes wait in the queue: nothing is flushed. The last step is not written."""
    Training(folder, name).train(MANY, 0.0, flush=False)


@pytest.mark.parametrize("strategy", ["async", "geo"])
def test_a_trainer_leaves_with_all_that_it_has_pushed(
    strategy, groups, steps_of, tmp_path
):
    """The other goes on; started again it goes on from there, too."""
    variables = {"CPUDIST_STRATEGY": strategy, **LONG_GRACE}
    job = {"TORCHELASTIC_RUN_ID": "victims", **variables}
    servers = groups.servers(**variables)
    steady = groups.trainer("steady", **variables)
    body = functools.partial(queue_for_ever, tmp_path, "victim")
    victim = groups.start("trainer", body, **job)
    for name in ("steady", "victim"):
        steps_of(name, 5)
    victim.signal(0, signal.SIGTERM)
    error = error_of(victim)
    assert (error["type"], error["text"]) == ("PreemptedError", "143")
    assert ended(victim) == [0]  # the harness has told it
    made = steps_of("victim") + 1  # the last one has raised
    before = steps_of("steady")
    steps_of("steady", before + 3)
    again = groups.trainer("victim", steps=made - 1 + TRAINED_ON, **job)
    who, _ = again.expect(0, "result", PATIENCE_S)["value"]
    (tmp_path / "stop").touch()
    mine, values = steady.expect(0, "result", PATIENCE_S)["value"]
    assert who == 1 - mine
    if strategy == "async":  # Geo averages what trainers have moved
        assert values[who] == made + TRAINED_ON
        assert values[mine] == steps_of("steady")
        assert values[8] == values[who] + values[mine]
    assert servers.results(PATIENCE_S) == [None, None]


def until_stopped(folder, context, report):
    """Trains until the file ``stop`` is there; then says what servers have."""
    rank = context.trainer_rank
    model, opt = wrapped("static")
    if context.environment.snapshot_dir:
        opt.resume()
    cpudist.barrier()
    path = folder / f"{rank}.steps"
    while not (folder / "stop").exists():
        with path.open("a") as file:
            file.write(".")  # of the step that begins
        if path.stat().st_size == 3:
            report("trains")
        step(opt, model, rank)
    return [path.stat().st_size, counted(opt, model)]


def test_in_one_job_it_says_goodbye_and_the_other_goes_on(tmp_path):
    body = functools.partial(until_stopped, tmp_path)
    with ProcessRanks(body, 3, servers=1, variables=ASYNC | LONG_GRACE) as ranks:
        for rank in (1, 2):
            ranks.expect(rank, "report", PATIENCE_S)
        ranks.signal(2, signal.SIGTERM)
        assert error_of(ranks, 2)["type"] == "PreemptedError"
        left = (tmp_path / "1.steps").stat().st_size
        (tmp_path / "stop").touch()
        made, values = ranks.expect(1, "result", PATIENCE_S)["value"]
        for some in values:
            assert some[:2] == [made, left]
        ranks.expect(0, "result", PATIENCE_S)


@pytest.mark.parametrize("servers", [0, 1])
def test_under_sync_it_is_lost_by_name_at_once(servers):
    """Others would go on with a smaller divisor; it ends as without a handler."""
    with ProcessRanks(
        train_forever, 2 + servers, servers=servers, variables=LONG_GRACE
    ) as ranks:
        last = 1 + servers
        for rank in range(servers, last + 1):
            ranks.expect(rank, "report", PATIENCE_S)
        ranks.signal(last, signal.SIGTERM)
        for rank in range(last):
            error = error_of(ranks, rank)
            assert error["type"] == "PeerLostError"
            assert "SIGTERM" in error["text"]
        assert ended(ranks)[last] == -signal.SIGTERM


def wait_for_ever(context, report):
    """One step whose pushes nobody answers; then the main thread waits in C."""
    model, opt = wrapped("static")
    cpudist.barrier()
    report("trains")
    while True:
        step(opt, model, context.trainer_rank)
        opt.flush("none")


def test_a_frozen_server_keeps_nobody_beyond_the_grace():
    clocks = {"CPUDIST_LIVENESS_MS": str(int(1000 * PATIENCE_S)), **SHORT_GRACE}
    with ProcessRanks(wait_for_ever, 2, servers=1, variables=ASYNC | clocks) as ranks:
        ranks.expect(1, "report", PATIENCE_S)
        lose_rank(ranks, 0, signal.SIGSTOP)
        began_s = ranks.signal(1, signal.SIGTERM)
        ranks.processes[1].join(PATIENCE_S)
        assert ranks.processes[1].exitcode == -signal.SIGTERM
        assert time.monotonic() - began_s >= 2.0  # as long as it may


# -- servers -----------------------------------------------------------------------


def shared(folder, **others):
    return {
        "CPUDIST_SNAPSHOT_DIR": str(folder / "snapshots"),
        "CPUDIST_REJOIN_S": str(int(PATIENCE_S)),
        **ASYNC,
        **others,
    }


def saved_by(folder):
    """Names by how new they are, all of which are whole."""
    found = Directory(folder / "snapshots")
    for name in found.names():
        assert Snapshot(found.folder(name)).verify() == []
    return [one.name for one in found.committed()]


def training(groups, tmp_path, variables):
    """Two servers in one job, and two trainers of jobs of their own, which train."""
    servers = groups.servers(**variables)
    body = functools.partial(train_and_outlive, tmp_path, "async", "static")
    trainers = [groups.start("trainer", body, **variables) for _ in range(2)]
    for job in trainers:
        job.expect(0, "report", PATIENCE_S)
    return servers, trainers


def test_servers_have_a_snapshot_saved_and_trainers_go_on_from_it(groups, tmp_path):
    """All of them get SIGTERM, as by torchrun whose job is preempted."""
    variables = shared(tmp_path, **LONG_GRACE)
    servers, trainers = training(groups, tmp_path, variables)
    assert saved_by(tmp_path) == ["kept"]
    for rank in range(2):
        servers.signal(rank, signal.SIGTERM)
    assert ended(servers) == [-signal.SIGTERM] * 2
    newest, *others = saved_by(tmp_path)
    assert others[-1] == "kept"
    again = groups.servers(**variables)
    found = [job.expect(0, "result", PATIENCE_S)["value"] for job in trainers]
    for rank, steps, recovered, values in found:
        assert recovered["count"] == 1
        for some in values:
            assert some[rank] == steps - recovered["lost_updates"]
    manifest = Directory(tmp_path / "snapshots").manifest(newest)
    lost = {rank: recovered["lost_updates"] for rank, _, recovered, _ in found}
    steps = {one.rank: one.steps for one in manifest.trainers}
    # Of 40 steps and more, the 20 since "kept" among them, these are none of the lost.
    assert min(steps.values()) > 40
    assert set(lost) == set(steps)
    assert again.results(PATIENCE_S) == [None, None]


def test_servers_without_trainers_end_with_the_newest_snapshot(groups, tmp_path):
    variables = shared(tmp_path, **LONG_GRACE)
    servers, trainers = training(groups, tmp_path, variables)
    for job in trainers:
        lose_rank(job, 0, signal.SIGKILL)
    for rank in range(2):
        servers.signal(rank, signal.SIGTERM)
    assert ended(servers) == [-signal.SIGTERM] * 2
    assert saved_by(tmp_path)[-1] == "kept"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_servers_one_of_which_has_ended_wait_for_no_snapshot(number, groups, tmp_path):
    """Trainers that wait for others in their place can save none."""
    variables = shared(tmp_path, **LONG_GRACE)
    servers, trainers = training(groups, tmp_path, variables)
    lose_rank(servers, 1, number)
    servers.processes[1].join(PATIENCE_S)
    servers.signal(0, signal.SIGTERM)
    assert ended(servers) == [-signal.SIGTERM, -number]
    again = groups.servers(**variables)
    for job in trainers:
        _, _, recovered, _ = job.expect(0, "result", PATIENCE_S)["value"]
        assert recovered["count"] == 1
    assert again.results(PATIENCE_S) == [None, None]


def test_a_frozen_trainer_keeps_servers_no_longer_than_the_grace(groups, tmp_path):
    clocks = {"CPUDIST_LIVENESS_MS": str(int(1000 * PATIENCE_S))}
    variables = shared(tmp_path, **clocks, **SHORT_GRACE)
    servers, trainers = training(groups, tmp_path, variables)
    for job in trainers:
        lose_rank(job, 0, signal.SIGSTOP)
    for rank in range(2):
        servers.signal(rank, signal.SIGTERM)
    assert ended(servers) == [-signal.SIGTERM] * 2
    assert saved_by(tmp_path) == ["kept"]


# -- all at once -------------------------------------------------------------------


def test_a_whole_job_saves_what_it_has_before_it_ends(tmp_path):
    """Trainer 0 saves, and all leave; so a preempted job goes on where it was."""
    variables = shared(tmp_path, **LONG_GRACE)
    del variables["CPUDIST_REJOIN_S"]
    body = functools.partial(until_stopped, tmp_path)
    with ProcessRanks(body, 3, servers=1, variables=variables) as ranks:
        for rank in (1, 2):
            ranks.expect(rank, "report", PATIENCE_S)
        for rank in range(3):
            ranks.signal(rank, signal.SIGTERM)
        for rank in range(3):
            assert error_of(ranks, rank)["type"] == "PreemptedError"
    [name] = saved_by(tmp_path)
    snapshot = Snapshot(tmp_path / "snapshots" / name)
    steps = {one.rank: one.steps for one in snapshot.manifest.trainers}
    made = {rank: (tmp_path / f"{rank}.steps").stat().st_size for rank in range(2)}
    assert steps[0] == made[0]
    assert 0 < steps[1] <= made[1]
    assert [int(n) for n in snapshot.dense("dense")[:2]] == [steps[0], steps[1]]


@pytest.mark.parametrize("strategy", ["sync", "allreduce"])
def test_a_process_alone_saves_what_it_has(strategy, tmp_path):
    variables = shared(tmp_path, **LONG_GRACE) | {"CPUDIST_STRATEGY": strategy}
    del variables["CPUDIST_REJOIN_S"]
    with ProcessRanks(
        functools.partial(until_stopped, tmp_path), 1, variables=variables
    ) as ranks:
        ranks.expect(0, "report", PATIENCE_S)
        ranks.signal(0, signal.SIGTERM)
        assert error_of(ranks)["type"] == "PreemptedError"
    [name] = saved_by(tmp_path)
    [trainer] = Snapshot(tmp_path / "snapshots" / name).manifest.trainers
    assert trainer.steps == (tmp_path / "0.steps").stat().st_size


# -- torchrun ----------------------------------------------------------------------

SCRIPT = """
import json, os, sys, time
import torch
import torch_cpudist as cpudist

cpudist.init()
model = torch.nn.Linear(1, 1)
opt = cpudist.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
for _ in range(3):
    model(torch.ones(1, 1)).sum().backward()
    opt.step()
with open(f"{restart}-{rank}.pid.tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, file.name.removesuffix(".tmp"))
if restart == "0":
    time.sleep(1e6)  # no step comes in which a loss would be noticed
cpudist.shutdown()
"""


def test_a_job_of_torchrun_is_restarted_without_a_wait(launch_forks, tmp_path):
    """It ends the others of a killed rank by SIGTERM, and after 30 s by SIGKILL."""
    (tmp_path / "train.py").write_text(SCRIPT)
    program = launch_forks(
        "torchrun --standalone --nproc-per-node=3 --max-restarts=1 train.py",
        **LONG_GRACE,
    )
    pids = [tmp_path / f"0-{rank}.pid" for rank in range(3)]
    until = time.monotonic() + PATIENCE_S
    while not all(path.exists() for path in pids):
        assert time.monotonic() < until, program.text()
        time.sleep(0.01)
    os.kill(int(pids[1].read_text()), signal.SIGKILL)
    assert program.wait(PATIENCE_S) == 0, program.text()
    assert sorted(path.name for path in tmp_path.glob("1-*.pid")) == [
        f"1-{rank}.pid" for rank in range(3)
    ]
    assert "forcefully" not in program.text()
