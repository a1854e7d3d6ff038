# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A trainer is killed while its pushes make rows of a remote table.

What a server holds afterwards tells how many of its pushes were applied there, and
whether each of them was as a whole.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import core_alone
import creating_rows
import numpy as np
import pytest
from creating_rows import BEGINS, SHARED, CreatingTrainer, new_rows
from patience import PATIENCE_S

from torch_cpudist import _core, errors

pytestmark = pytest.mark.processes

VICTIM = """
import itertools, json, sys
sys.path.insert(0, sys.argv[1])
from creating_rows import CreatingTrainer
trainer = CreatingTrainer(core, 1, sys.argv[2] == "on_arrival", json.loads(sys.argv[3]))
trainer.begin()
for number in itertools.count():
    trainer.step(number)
    print(number, flush=True)
"""
SERVERS = 2
LEAST_STEPS = 5  # of the victim, before it is killed
MORE_STEPS = 10  # of the survivor, afterwards
LIVENESS = {"reconnect_grace_ms": 200, "liveness_ms": 5000}


@pytest.fixture
def servers():
    """Two servers of this process, over sockets."""
    made = [
        _core.Server(
            run_id=7, shard_id=s, server_count=SERVERS, trainer_count=2, **LIVENESS
        )
        for s in range(SERVERS)
    ]
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def victim(servers):
    """Starts the trainer that is killed, at the latest with the test."""
    started = []

    def start(addresses, on_arrival):
        mode = "on_arrival" if on_arrival else "in_rounds"
        folder = str(Path(creating_rows.__file__).parent)
        process = subprocess.Popen(
            core_alone.command(VICTIM, folder, mode, json.dumps(addresses)),
            stdout=subprocess.PIPE,
            text=True,
            env=core_alone.environment(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=PATIENCE_S)
        process.stdout.close()


def moved(trainer, keys):
    """By how much each row has moved; a row is moved as a whole."""
    rows = trainer.lookup(keys, keep=False)
    assert (rows == rows[:, :1]).all()
    return BEGINS - rows[:, 0]


def applied_pushes(trainer, keys_by_server, rank, each):
    """How many pushes of a rank each server has applied; every one of them whole."""
    counts = [0] * SERVERS
    for step in range(10_000):
        keys = new_rows(rank, step)
        gone = moved(trainer, keys)
        found = [set(gone[keys_by_server(keys) == s].tolist()) for s in range(SERVERS)]
        assert all(one in ({0.0}, {each}) for one in found), found
        for server, one in enumerate(found):
            if one == {each}:
                assert counts[server] == step  # none before it was left out
                counts[server] += 1
        if all(one == {0.0} for one in found):
            return counts
    raise AssertionError("pushes without end")


def owner_of(keys):
    """The server of each key."""
    return np.array(_core.owner_of_keys(keys.tolist(), "words", SERVERS))


def test_a_killed_trainer_leaves_whole_rows_and_the_other_goes_on(servers, victim):
    addresses = [server.listen_tcp() for server in servers]
    process = victim(addresses, True)
    survivor = CreatingTrainer(_core, 0, True, addresses)
    survivor.begin()
    steps = 0
    while int(process.stdout.readline()) < LEAST_STEPS:
        survivor.step(steps)
        steps += 1
    process.kill()
    for _ in range(MORE_STEPS):
        survivor.step(steps)
        steps += 1
    process.wait(timeout=PATIENCE_S)
    survivor.set.drain()
    wait_for_loss(servers)
    for _ in range(MORE_STEPS):  # also once the servers know
        survivor.step(steps)
        steps += 1
    survivor.set.drain()
    own = applied_pushes(survivor, owner_of, 0, 1.0)
    assert own == [steps] * SERVERS
    others = applied_pushes(survivor, owner_of, 1, 1.0)
    assert min(others) >= LEAST_STEPS - 1
    # All together, and no row besides.
    total = np.array(own) + np.array(others)
    assert (moved(survivor, SHARED) == total[owner_of(SHARED)]).all()
    check_created(servers, own, others)


def test_a_killed_trainer_ends_the_round_of_the_other(servers, victim):
    addresses = [server.listen_tcp() for server in servers]
    process = victim(addresses, False)
    survivor = CreatingTrainer(_core, 0, False, addresses)
    survivor.begin()
    done = []

    def train():
        for number in range(10_000):
            survivor.step(number)
            done.append(number)
            if len(done) == LEAST_STEPS:
                process.kill()

    with pytest.raises(errors.PeerLostError, match="trainer 1"):
        train()
    steps = len(done)
    assert steps >= LEAST_STEPS
    own = applied_pushes(survivor, owner_of, 0, 0.5)
    others = applied_pushes(survivor, owner_of, 1, 0.5)
    assert own == others  # rounds are applied as a whole
    assert set(own) <= {steps, steps + 1}
    assert (moved(survivor, SHARED) == np.array(own)[owner_of(SHARED)]).all()
    check_created(servers, own, others)


def wait_for_loss(servers):
    """Until each server has noticed."""
    for server in servers:
        with pytest.raises(errors.PeerLostError, match="trainer 1"):
            server.wait_done(PATIENCE_S)


def check_created(servers, own, others):
    """Each server made the rows that it holds, once, and no other."""
    shared = np.bincount(owner_of(SHARED), minlength=SERVERS)
    for index, server in enumerate(servers):
        made = int(shared[index])
        for rank, counts in enumerate((own, others)):
            for step in range(counts[index]):
                made += int((owner_of(new_rows(rank, step)) == index).sum())
        (table,) = server.table_stats()
        assert table["rows"] == table["created"] == made
