# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Servers and trainers in jobs of their own: what dies is missed by nobody else."""

# ruff: noqa: F811  (fixtures)

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import socket
import threading
from pathlib import Path

import pytest
from endings import lose, lose_rank
from group_fixtures import groups, steps_of  # noqa: F401
from loss_cases import KILLED_S, LIVENESS, LOSSES, check_ended, check_loss
from patience import PATIENCE_S
from torch.distributed import TCPStore
from train_groups import MANY, Training

import torch_cpudist as cpudist
from torch_cpudist import _core

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("train_groups.py")


def results(job):
    return job.expect(0, "result", PATIENCE_S)["value"]


def check_servers_end(servers, ranks=2):
    assert [servers.expect(r, "result", PATIENCE_S)["value"] for r in range(ranks)] == [
        None
    ] * ranks


def test_a_killed_trainer_rejoins_and_nobody_else_notices(
    groups, steps_of, launch_forks, tmp_path
):
    """Every step that a trainer saw applied is in the result, once; and no other.

    torchrun restarts the killed one. Meanwhile a third trainer comes late and leaves
    early.
    """
    victim = launch_forks(
        "torchrun --standalone --nproc-per-node=1 --max-restarts=2 "
        f"{SCRIPT} victim 30 0.02",
        **groups.variables("trainer"),
    )
    servers = groups.servers()
    steady = groups.trainer("steady")
    steps_of("steady", 1)
    before = steps_of("victim", 10)
    pid = int((tmp_path / "victim.pid").read_text())
    lose(pid, signal.SIGKILL)
    late, late_values = results(groups.trainer("late", steps=5))
    assert late_values[late] == 5
    assert victim.wait(PATIENCE_S) == 0, victim.text()
    assert int((tmp_path / "victim.pid").read_text()) != pid
    (tmp_path / "stop").touch()
    mine, values = results(steady)
    check_servers_end(servers)
    victims, _ = json.loads(victim.text().splitlines()[-1])
    assert {mine, victims, late} == {0, 1, 2}
    assert values[mine] == steps_of("steady")
    assert steps_of("victim") >= before + 30
    # A step that was applied but not written down before the kill, at most.
    assert values[victims] - steps_of("victim") in (0, 1)
    assert values[late] == 5
    assert sum(values[:8]) == values[8]


@pytest.mark.parametrize(("number", "clocks", "limit_s"), LOSSES)
def test_a_lost_server_ends_every_trainer_with_its_name(
    number, clocks, limit_s, groups, steps_of
):
    servers = groups.servers(**clocks)
    trainers = [groups.trainer(name, pause_s=0.01, **clocks) for name in "ab"]
    for name in "ab":
        steps_of(name, 3)
    lost_s = lose_rank(servers, 1, number)
    for job in trainers:
        entry = job.expect(0, "error", PATIENCE_S)
        check_loss(entry, lost_s, limit_s, r"^server 1\b")
        if number == signal.SIGKILL:
            check_ended(entry)


def test_a_killed_trainer_ends_the_others_under_sync(groups, steps_of):
    """Rounds wait for exactly the trainers of the start."""
    sync = {"CPUDIST_STRATEGY": "sync"}
    servers = groups.servers(ranks=1, **sync)
    victim, other = (groups.trainer(name, pause_s=0.01, **sync) for name in "ab")
    for name in "ab":
        steps_of(name, 3)
    lost_s = lose_rank(victim, 0, signal.SIGKILL)
    entry = other.expect(0, "error", PATIENCE_S)
    check_loss(entry, lost_s, KILLED_S, r"trainer \d \(")
    # Dead is not done: the servers wait for CPUDIST_REJOIN_S.
    with pytest.raises(cpudist.OperationTimeoutError, match="no result within"):
        servers.expect(0, "result", 0.2)


# -- waking up, giving up ----------------------------------------------------------


def watch(folder, name, context, report):
    """Trains; at a barrier, which waits for those who live, tells the values."""
    training = Training(folder, name)
    for file in ("frozen", "woken"):
        while not (folder / file).exists():
            training.step()
        context.barrier()
        report(training.values())
    training.train(MANY, 0.01)
    return [context.trainer_rank, training.values()]


def test_a_frozen_trainer_that_wakes_up_is_refused_and_its_restart_goes_on(
    groups, steps_of, tmp_path
):
    clocks = LIVENESS
    servers = groups.servers(**clocks)
    body = functools.partial(watch, tmp_path, "steady")
    steady = groups.start("trainer", body, **clocks)
    job = {"TORCHELASTIC_RUN_ID": "victims", **clocks}
    # Else it would go on by itself: test_rejoin.py.
    victim = groups.trainer("victim", pause_s=0.0, CPUDIST_REJOIN_S="0", **job)
    steps_of("victim", 5)
    steps_of("steady", 1)
    lose_rank(victim, 0, signal.SIGSTOP)
    (tmp_path / "frozen").touch()
    # The barrier ends once no server waits for the frozen one any more.
    before = steady.expect(0, "report", PATIENCE_S)["value"]
    written = steps_of("victim")
    victim.signal(0, signal.SIGCONT)
    error = victim.expect(0, "error", PATIENCE_S)["value"]
    assert error["type"] == "PeerLostError"
    assert re.search(r"trainer \d \(.*pid.* was lost: silent for 3\.0 s", error["text"])
    assert "only a restart of it can come back" in error["text"]
    (tmp_path / "woken").touch()
    after = steady.expect(0, "report", PATIENCE_S)["value"]
    # An answer that came while it was frozen, at most.
    steps = steps_of("victim")
    assert steps - written in (0, 1)
    again = groups.trainer("victim", steps=steps + 7, pause_s=0.0, **job)
    who, _ = results(again)
    (tmp_path / "stop").touch()
    mine, values = results(steady)
    assert who == 1 - mine
    check_servers_end(servers)
    # The step under way when it froze may have been applied, on each server for itself.
    assert before[who] - steps in (0, 1)
    assert after[who] == before[who]
    assert values[who] == before[who] + 7
    assert values[mine] == steps_of("steady")
    assert values[8] - values[mine] - 7 - steps in (0, 1)


def test_a_trainer_that_comes_back_when_the_others_are_gone_goes_on(
    groups, steps_of, tmp_path
):
    servers = groups.servers()
    steady = groups.trainer("steady")
    job = {"TORCHELASTIC_RUN_ID": "victims"}
    victim = groups.trainer("victim", **job)
    for name in ("steady", "victim"):
        steps_of(name, 3)
    lose_rank(victim, 0, signal.SIGKILL)
    (tmp_path / "stop").touch()
    mine, _ = results(steady)
    (tmp_path / "stop").unlink()
    steps = steps_of("victim")
    who, values = results(groups.trainer("victim", steps=steps + 3, **job))
    check_servers_end(servers)
    assert who == 1 - mine
    assert values[mine] == steps_of("steady")
    assert values[who] - steps - 3 in (0, 1)


def test_a_stranger_with_a_later_number_ends_no_trainer_for_good(
    groups, steps_of, tmp_path
):
    """One that has read at the meeting point where servers listen; there is no key."""
    servers = groups.servers()
    jobs = {name: {"TORCHELASTIC_RUN_ID": f"job {name}"} for name in "ab"}
    trainers = {name: groups.trainer(name, **job) for name, job in jobs.items()}
    for name in jobs:
        steps_of(name, 3)
    run_id, addresses = groups.addresses()

    def stranger(rank, incarnation):
        return _core.Client(
            run_id=run_id,
            trainer_rank=rank,
            trainer_count=2,
            servers=addresses,
            incarnation=incarnation,
            connect_deadline_ms=int(PATIENCE_S * 1000),
        )

    for rank in range(2):
        with pytest.raises(cpudist.ConfigMismatchError, match="expected at most"):
            stranger(rank, 2**32 - 1).connect()
    for name in jobs:
        steps_of(name, steps_of(name) + 3)  # they go on
    with contextlib.ExitStack() as ends:
        for rank in range(2):
            taken = stranger(rank, 7)
            taken.connect()
            ends.callback(taken.abort, "the test is over")
        for trainer in trainers.values():
            error = trainer.expect(0, "error", PATIENCE_S)["value"]
            assert error["type"] == "FencedError", error
        made = {name: steps_of(name) for name in jobs}
        trainers = {
            name: groups.trainer(name, steps=made[name] + 3, **job)
            for name, job in jobs.items()
        }
        for trainer in trainers.values():
            warning = trainer.expect(0, "warning", PATIENCE_S)["value"]
            assert "has taken over from this one, 2. This process takes" in warning
        for name, trainer in trainers.items():
            who, values = results(trainer)
            assert values[who] - made[name] - 3 in (0, 1)
    check_servers_end(servers)


def test_servers_give_up_a_trainer_that_does_not_come_back(groups, steps_of, tmp_path):
    servers = groups.servers(CPUDIST_REJOIN_S="2")
    steady = groups.trainer("steady")
    victim = groups.trainer("victim")
    for name in ("steady", "victim"):
        steps_of(name, 1)
    lost_s = victim.signal(0, signal.SIGKILL)
    (tmp_path / "stop").touch()
    results(steady)
    for rank in range(2):
        warning = servers.expect(rank, "warning", PATIENCE_S)["value"]
        assert "1 trainers were lost and did not come back within" in warning
        assert servers.expect(rank, "result", PATIENCE_S)["time_s"] - lost_s >= 2.0


# -- settings, the store -----------------------------------------------------------


def test_jobs_with_other_settings_are_refused_and_nobody_else_notices(groups, tmp_path):
    servers = groups.servers()
    others = {
        "CPUDIST_LIVENESS_MS": "4000",
        "CPUDIST_STRATEGY": "sync",
        "CPUDIST_TRAINERS": "3",
        "CPUDIST_COMMUNICATOR_SEND_QUEUE_SIZE": "7",
    }
    refused = {n: groups.trainer(n, **{n: text}) for n, text in others.items()}
    for name, job in refused.items():
        entry = job.expect(0, "error", PATIENCE_S)["value"]
        assert entry["type"] == "ConfigMismatchError", entry
        assert f"{name}: {others[name]} on this trainer" in entry["text"]
    right = [groups.trainer(name, steps=3) for name in "ab"]
    assert {results(job)[0] for job in right} == {0, 1}
    check_servers_end(servers)


def test_a_trainer_that_meets_no_server_says_where(groups):
    variables = groups.variables("trainer")
    with pytest.raises(cpudist.OperationTimeoutError, match="nobody answers at") as e:
        cpudist.init(timeout_s=0.2, variables=variables)
    assert variables["CPUDIST_RENDEZVOUS"] in str(e.value)


def test_somebody_mute_in_the_place_of_servers_is_said_within_the_time(groups):
    variables = groups.variables("trainer")
    host, _, port = variables["CPUDIST_RENDEZVOUS"].partition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(cpudist.OperationTimeoutError, match="no answer in time"),
    ):
        cpudist.init(timeout_s=0.2, variables=variables)


def test_a_store_of_torch_in_the_place_of_servers_is_said_within_the_time(groups):
    variables = groups.variables("trainer")
    host, _, port = variables["CPUDIST_RENDEZVOUS"].partition(":")
    kept = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    with pytest.raises(cpudist.OperationTimeoutError, match="nobody answers at"):
        cpudist.init(timeout_s=0.2, variables=variables)
    del kept


def test_a_trainer_waits_for_others_no_longer_than_it_is_told(groups):
    """Servers wait for them as long as CPUDIST_REJOIN_S, which is much longer."""
    served = cpudist.init(variables=groups.variables("server", CPUDIST_TRAINERS="2"))
    errors = []

    def train():
        try:
            cpudist.init(timeout_s=8.0, variables=groups.variables("trainer"))
        except cpudist.Error as error:
            errors.append(str(error))

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    trainer.join(PATIENCE_S)
    served.abort("the test ends")
    assert len(errors) == 1
    assert "not all of CPUDIST_TRAINERS=2 trainers came" in errors[0]
