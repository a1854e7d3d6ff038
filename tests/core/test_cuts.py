# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Cuts of snapshots through the binding; servers without a directory take none."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
from core_cluster import HIDDEN, Cluster, address
from patience import PATIENCE_S

from torch_cpudist import _core, errors

LONG_MS = 60_000


class ArrivalCluster(Cluster):
    """A cluster whose set is updated on arrival."""

    def __init__(self, trainers, servers, **options):
        super().__init__(trainers, servers, **options)
        layout = self.layout
        self.layout = _core.ParamSetLayout(
            layout.configs, layout.tables, layout.blocks, on_arrival=True
        )


def step(trainer, pushes=None):
    """One push, through the queue where there is one."""
    dense = np.ones(HIDDEN, np.float32)
    if pushes is None:
        trainer.push(dense=dense)
        return
    pushes.enqueue(
        configs=[trainer.config],
        parameters=[(0, address(dense))],
        weights=[address(trainer.dense)],
    )


def test_rounds_mark_by_themselves():
    def work(trainer):
        step(trainer)
        name = "snap-1" if trainer.rank == 0 else ""
        return trainer.set.mark_cut(1, name, LONG_MS)

    with Cluster(2, 2).start() as cluster:
        answers = cluster.run(work)
        assert answers[0] == answers[1]
        taken, name, reason, taken_back = answers[0]
        assert not taken_back
        assert not taken
        assert name == "snap-1"
        assert "directory" in reason
        assert cluster.run(lambda t: t.set.cut_wanted()) == [0, 0]


def test_an_announced_cut_is_asked_for_by_the_next_round():
    def work(trainer):
        step(trainer)
        if trainer.rank == 0:
            assert trainer.set.announce_cut(1, "snap-1", LONG_MS) == ""
        assert trainer.set.cut_wanted() == 0
        cluster_barrier.wait(PATIENCE_S)
        step(trainer)
        assert trainer.set.cut_wanted() == 1
        return trainer.set.mark_cut(1, "snap-1" if trainer.rank == 0 else "", LONG_MS)

    cluster_barrier = threading.Barrier(2)
    with Cluster(2, 2).start() as cluster:
        for _, name, reason, _ in cluster.run(work):
            assert name == "snap-1"
            assert "directory" in reason


def test_on_arrival_the_marker_is_queued():
    with ArrivalCluster(2, 2).start() as cluster:
        first, second = cluster.trainers
        queues = [
            t.set.start_queue(size=2, max_merge=2, mean=[False], pull_every=1)
            for t in cluster.trainers
        ]
        step(first, queues[0])
        assert queues[0].cut_answer() is None
        queues[0].mark_cut(3, "snap-3", LONG_MS)
        queues[0].mark_cut(4, "snap-4", LONG_MS)  # goes when that is answered
        deadline = time.monotonic() + PATIENCE_S
        while second.set.cut_wanted() != 3:
            step(second, queues[1])
            second.set.drain()
            assert time.monotonic() < deadline
        for number in (3, 4):
            queues[1].mark_cut(number, "", LONG_MS)
        for trainer, queue in zip(cluster.trainers, queues, strict=True):
            trainer.set.drain()
            for expected in (3, 4):
                number, taken, name, reason, _ = queue.cut_answer()
                assert (number, taken, name) == (expected, False, f"snap-{expected}")
                assert "directory" in reason
            assert queue.cut_answer() is None


def test_a_cut_is_given_up_in_time():
    with Cluster(2, 1).start() as cluster:
        taken, _, reason, _ = cluster.trainers[0].set.mark_cut(1, "snap-1", 30)
        assert not taken
        assert "no marker in time from trainers 1" in reason


def test_a_timeout_leaves_the_marker_in_flight():
    with Cluster(2, 1, probe_ms=20, round_deadline_ms=300).start() as cluster:
        with pytest.raises(errors.OperationTimeoutError, match="trainer 1"):
            cluster.trainers[0].set.mark_cut(1, "snap-1", LONG_MS)
        cluster.trainers[1].set.mark_cut(1, "", LONG_MS)
        cluster.trainers[0].set.abandon_cut(1)  # behind what was in flight


def test_names_and_numbers_that_cannot_be_are_refused():
    with Cluster(1, 1).start() as cluster:
        parameters = cluster.trainers[0].set
        for number, name in [(0, "a"), (1, "../a"), (1, "A"), (1, "a" * 97)]:
            with pytest.raises(ValueError, match="found"):
                parameters.mark_cut(number, name, LONG_MS)


def test_status_of_what_nobody_has_cut():
    with Cluster(1, 2).start() as cluster:
        parameters = cluster.trainers[0].set
        status = parameters.cut_status(1, 7)
        assert status["state"] == 0
        assert status["shard"] == 1
        assert status["files"] == []
        token = parameters.cut_status(0, 0, "token")
        assert token["state"] == 3
        assert "directory" in token["reason"]
        with pytest.raises(ValueError, match="server 2"):
            parameters.cut_status(2, 7)


def saved_dense(directory):
    """What all servers' files of dense parameters have, one after the other."""
    values = []
    for path in sorted(directory.glob("s*-dense.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        for name, entry in header.items():
            if name.endswith(".weight"):
                begin, end = entry["data_offsets"]
                part = data[8 + size + begin : 8 + size + end]
                values.append(np.frombuffer(part, np.float32))
    return np.concatenate(values)


def await_done(parameters, server, number):
    deadline = time.monotonic() + PATIENCE_S
    while parameters.cut_status(server, number)["state"] == 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return parameters.cut_status(server, number)


def test_what_is_cut_has_the_pushes_before_each_marker(tmp_path):
    """Gradients are ones: the values count the pushes, equally on both servers."""
    captured = {}

    def work(trainer):
        rank, cuts = trainer.rank, 0
        queue = trainer.set.start_queue(size=3, max_merge=3, mean=[False], pull_every=1)
        steps = 0
        while cuts < 3:
            step(trainer, queue)
            steps += 1
            number = cuts + 1 if rank == 0 else trainer.set.cut_wanted()
            if number <= cuts:
                continue
            captured[number, rank] = steps
            queue.mark_cut(number, f"snap-{number}" if rank == 0 else "", LONG_MS)
            trainer.set.drain()
            number, taken, _, reason, _ = queue.cut_answer()
            assert taken, reason
            cuts = number
            if rank == 0:
                done = [await_done(trainer.set, s, number) for s in range(2)]
                assert [status["state"] for status in done] == [2, 2], done
                assert [status["members"] for status in done] == [[0, 1, 2]] * 2
        trainer.set.leave()

    with ArrivalCluster(3, 2) as cluster:
        for server in cluster.servers:
            server.set_snapshot_directory(str(tmp_path))
        for trainer in cluster.trainers:
            trainer.dense[:] = 0
        cluster.start().run(work)
        for number in (1, 2, 3):
            pushes = sum(captured[number, rank] for rank in range(3))
            found = saved_dense(tmp_path / f"snap-{number}")
            np.testing.assert_array_equal(found, np.full(HIDDEN, -0.5 * pushes))
