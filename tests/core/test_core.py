# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Client and server through the binding: training, membership, faults."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from core_cluster import DIM, HIDDEN, ROWS, Cluster, address, run_all
from patience import PATIENCE_S

from torch_cpudist import _core, errors

LR = np.float32(0.5)
STEPS = 6


def batch(rank, step, size=12):
    """Ids with duplicates, and one gradient row for each of them."""
    rng = np.random.default_rng([rank, step])
    ids = rng.integers(0, ROWS, size)
    return ids, rng.standard_normal((size, DIM)).astype(np.float32)


def train(trainer, steps=STEPS, **options):
    for step in range(steps):
        ids, noise = batch(trainer.rank, step)
        trainer.pull(ids)
        # The gradient depends on the pulled weights, so a stale row shows.
        rows = noise + np.float32(0.1) * trainer.table[ids]
        dense = np.float32(trainer.rank + 1) * trainer.dense
        assert trainer.push(ids, rows, dense, **options) == step


def expected_weights(cluster_trainers, start, steps=STEPS):
    """The same training by numpy, trainers in rank order, duplicates in batch order."""
    table, dense = (values.astype(np.float64) for values in start)
    for step in range(steps):
        total = np.zeros_like(table)
        total_dense = np.zeros_like(dense)
        for rank in range(cluster_trainers):
            ids, noise = batch(rank, step)
            np.add.at(total, ids, noise + 0.1 * table[ids])
            total_dense += (rank + 1) * dense
        table -= LR * total / cluster_trainers
        dense -= LR * total_dense / cluster_trainers
    return table, dense


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_sgd_equals_numpy(trainers, servers):
    with Cluster(trainers, servers) as cluster:
        start = cluster.trainers[0].table.copy(), cluster.trainers[0].dense.copy()
        cluster.start()
        cluster.run(train)
        expected = expected_weights(trainers, start)
        for trainer in cluster.trainers:
            trainer.set.pull_all_rows()
            np.testing.assert_allclose(trainer.table, expected[0], atol=2e-5)
            np.testing.assert_allclose(trainer.dense, expected[1], atol=2e-5)
            for local, remote in zip(
                (trainer.table, trainer.dense), trainer.fetch(), strict=True
            ):
                np.testing.assert_array_equal(local, remote)
        cluster.run(lambda trainer: trainer.client.goodbye())
        assert all(server.wait_done(5.0) for server in cluster.servers)


def test_table_stats_tell_each_servers_share():
    with Cluster(1, 3) as cluster:
        cluster.start()
        cluster.run(train)
        shares = [server.table_stats() for server in cluster.servers]
        assert sum(share[0]["rows"] for share in shares) == ROWS
        for (share,), server in zip(shares, cluster.servers, strict=True):
            assert (share["param_set"], share["name"]) == (0, "words")
            # All rows were stored: none was made by a push.
            assert (share["remote"], share["created"]) == (False, 0)
            assert share["rows"] == server.stats()["rows"]
            assert share["bytes"] == server.stats()["table_bytes"]
        cluster.run(lambda trainer: trainer.client.goodbye())


def train_and_fetch(plan, **options):
    with Cluster(2, 2, plan, **options) as cluster:
        cluster.start()
        cluster.run(lambda trainer: train(trainer, clip_norm=0.5))
        weights = cluster.trainers[0].fetch()
        return *weights, cluster.network.counts(), cluster.trainers[0].client.stats()


def test_faults_change_no_bit():
    plan = _core.FaultPlan(drop=0.2, duplicate=0.2, reorder=0.2, cut=0.02, seed=11)
    calm_table, calm_dense, calm, _ = train_and_fetch(None)
    table, dense, counts, stats = train_and_fetch(plan, probe_ms=10, resend_ms=10)
    np.testing.assert_array_equal(table, calm_table)
    np.testing.assert_array_equal(dense, calm_dense)
    assert calm.dropped == calm.duplicated == calm.reordered == calm.cut == 0
    assert min(counts.dropped, counts.duplicated, counts.reordered, counts.cut) > 0
    assert stats["resent"] > 0
    assert stats["reconnects"] > 0


def test_two_runs_are_bit_identical():
    first = train_and_fetch(None)
    second = train_and_fetch(None)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_clip_norm_is_that_of_the_whole_gradient():
    with Cluster(2, 2) as cluster:
        cluster.start()
        before = cluster.trainers[0].dense.copy()
        gradient = np.arange(HIDDEN, dtype=np.float32)
        cluster.run(lambda t: t.push(dense=gradient * (t.rank + 1), clip_norm=2.0))
        mean = 1.5 * gradient.astype(np.float64)
        expected = before - 0.5 * mean * 2.0 / np.linalg.norm(mean)
        for trainer in cluster.trainers:
            np.testing.assert_allclose(trainer.dense, expected, atol=1e-5)


def test_pull_brings_each_row_once_a_step():
    with Cluster(1, 2) as cluster:
        (trainer,) = cluster.start().trainers
        trainer.pull(np.array([3, 5, 3, 9], dtype=np.int32))
        trainer.pull(np.array([9, 5]))
        assert trainer.client.stats()["rows_pulled"] == 3
        assert np.isnan(trainer.table).all(axis=1).sum() == ROWS - 3
        trainer.push([3], np.ones((1, DIM)))
        trainer.pull(np.array([9]))
        assert trainer.client.stats()["rows_pulled"] == 4


def test_gradient_of_an_unpulled_row_is_refused_before_sending():
    with Cluster(1, 1) as cluster:
        (trainer,) = cluster.start().trainers
        trainer.pull(np.array([3]))
        requests = trainer.client.stats()["requests"]
        with pytest.raises(errors.UnpulledRowError, match=r"'words'.*row 4"):
            trainer.push([3, 4], np.ones((2, DIM)))
        with pytest.raises(errors.RowOutOfRangeError, match=f"{ROWS}"):
            trainer.pull(np.array([ROWS]))
        assert trainer.client.stats()["requests"] == requests
        assert trainer.push([3], np.ones((1, DIM))) == 0


def test_one_leaves_the_other_goes_on_and_it_joins_again():
    gradient = np.ones(HIDDEN, np.float32)
    with Cluster(2, 2) as cluster:
        first, second = cluster.start().trainers
        cluster.run(lambda t: t.push(dense=gradient))
        second.set.leave()
        assert not second.set.is_member()
        assert [first.push(dense=gradient) for _ in range(3)] == [1, 2, 3]
        first.set.leave()
        second.pull_dense()
        np.testing.assert_array_equal(second.dense, first.dense)
        assert second.push(dense=gradient) == 4
        assert second.set.is_member()
        first.pull_dense()
        np.testing.assert_array_equal(second.dense, first.dense)


def test_barrier_makes_all_members_at_the_current_round():
    gradient = np.ones(HIDDEN, np.float32)
    with Cluster(2, 2) as cluster:
        first, second = cluster.start().trainers
        second.set.leave()
        for _ in range(3):
            first.push(dense=gradient)
        cluster.run(lambda t: t.client.barrier())
        assert second.set.is_member()
        assert cluster.run(lambda t: t.push(dense=gradient)) == [3, 3]


def test_state_goes_to_the_servers_and_back():
    config = _core.OptimizerConfig("adagrad", lr=0.1, eps=1e-10)
    with Cluster(1, 3, config=config) as cluster:
        (trainer,) = cluster.start().trainers
        rng = np.random.default_rng(1)
        table, state = rng.random((2, ROWS, DIM), dtype=np.float32)
        counts = rng.integers(1, 9, ROWS).astype(np.uint32)
        dense, dense_state = rng.random((2, HIDDEN), dtype=np.float32)
        arrays = table, state, counts
        trainer.set.store_run(0, 0, ROWS, *[address(array) for array in arrays], 17)
        trainer.set.store_parameter(0, address(dense), address(dense_state), 4)

        found = [np.zeros_like(array) for array in arrays]
        step = trainer.set.fetch_run(0, 0, ROWS, *[address(array) for array in found])
        assert step == 17
        for array, expected in zip(found, arrays, strict=True):
            np.testing.assert_array_equal(array, expected)
        found = [np.zeros_like(dense), np.zeros_like(dense_state)]
        assert trainer.set.fetch_parameter(0, *[address(array) for array in found]) == 4
        np.testing.assert_array_equal(found[0], dense)
        np.testing.assert_array_equal(found[1], dense_state)


def test_different_hyper_parameters_are_refused():
    with Cluster(2, 1) as cluster:
        _, second = cluster.start().trainers
        second.config = _core.OptimizerConfig("sgd", lr=0.25)
        gradient = np.ones(HIDDEN, np.float32)

        def push(trainer):
            with pytest.raises(errors.ConfigMismatchError):
                trainer.push(dense=gradient)

        cluster.run(push)


class Named:
    """What a client logs; says when it has named whom it waits for."""

    def __init__(self):
        self.lines = []
        # The first line comes after so many ms of waiting.
        self.options = {"probe_ms": 20, "straggler_log_ms": 100}
        self.options["logger"] = lambda level, text: self.lines.append(text)

    def wait(self, name="trainer 1"):
        deadline = time.monotonic() + PATIENCE_S
        while not any(name in line for line in list(self.lines)):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_stragglers_are_named():
    named = Named()
    with Cluster(2, 2, **named.options) as cluster:
        first, second = cluster.start().trainers
        gradient = np.ones(HIDDEN, np.float32)
        named.lines.clear()

        def push_when_named():
            named.wait()
            return second.push(dense=gradient)

        assert run_all([lambda: first.push(dense=gradient), push_when_named]) == [0, 0]
        assert first.client.stats()["round_wait_s"] >= 0.1


def test_a_timeout_leaves_the_push_in_flight():
    options = {"probe_ms": 20, "round_deadline_ms": 300}
    with Cluster(2, 2, **options) as cluster:
        first, second = cluster.start().trainers
        gradient = np.ones(HIDDEN, np.float32)
        with pytest.raises(errors.OperationTimeoutError, match="trainer 1"):
            first.push(dense=gradient)
        assert second.push(dense=gradient) == 0
        # The next call takes the answer; a gradient from before it is refused.
        with pytest.raises(errors.InvalidArgumentError, match="interrupted"):
            first.push(dense=gradient)
        first.pull_dense()
        assert cluster.run(lambda t: t.push(dense=gradient)) == [1, 1]
        np.testing.assert_array_equal(first.dense, second.dense)


def test_a_long_wait_outlasts_the_rpc_deadline():
    named = Named()
    # Named once the wait is twice as long as the deadline.
    options = named.options | {"rpc_deadline_ms": 200, "straggler_log_ms": 400}
    with Cluster(2, 1, **options) as cluster:
        first, second = cluster.start().trainers
        gradient = np.ones(HIDDEN, np.float32)
        named.lines.clear()

        def push_late():
            named.wait()
            return second.push(dense=gradient)

        assert run_all([lambda: first.push(dense=gradient), push_late]) == [0, 0]
        assert first.client.stats()["round_wait_s"] >= 0.4


def test_abort_ends_a_wait():
    named = Named()
    with Cluster(2, 1, **named.options) as cluster:
        first, _ = cluster.start().trainers
        named.lines.clear()

        def abort():
            named.wait()
            first.client.abort("enough")

        def push():
            with pytest.raises(errors.ClosedError, match="enough"):
                first.push(dense=np.ones(HIDDEN, np.float32))

        run_all([push, abort])


def test_a_newer_incarnation_fences_the_older():
    with Cluster(1, 1, elastic=True) as cluster:
        (trainer,) = cluster.start().trainers
        successor = cluster.make_client(0, 1, incarnation=2)
        successor.connect()
        with pytest.raises(errors.FencedError):
            trainer.pull_dense()
        successor.abort("the test is over")


def test_a_stopped_server_is_lost():
    with Cluster(1, 2, reconnect_grace_ms=100) as cluster:
        (trainer,) = cluster.start().trainers
        cluster.servers[1].stop()
        with pytest.raises((errors.PeerLostError, errors.ClosedError)):
            trainer.pull_dense()
        with pytest.raises((errors.PeerLostError, errors.ClosedError)):
            trainer.push(dense=np.ones(HIDDEN, np.float32))
        assert not trainer.client.out_of_reach()  # it has said so


def test_a_forked_child_gets_a_typed_error():
    with Cluster(1, 1) as cluster:
        (trainer,) = cluster.start().trainers
        child = os.fork()
        if child == 0:
            code = 1
            try:
                trainer.pull_dense()
            except errors.ForkedProcessError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        trainer.pull_dense()


def test_other_run_and_other_counts_are_refused():
    with Cluster(2, 1) as cluster:
        for options in ({"run_id": 8}, {"trainer_count": 3}):
            client = cluster.make_client(0, 2, **options)
            with pytest.raises((errors.ProtocolError, errors.ConfigMismatchError)):
                client.connect()


def test_unreachable_server_is_named():
    client = _core.Client(
        run_id=7, servers=[["unix:@cpudist-nobody"]], connect_deadline_ms=200
    )
    with pytest.raises(errors.AddressError, match="server 0"):
        client.connect()


def test_concurrent_pulls_of_the_same_rows():
    with Cluster(1, 2) as cluster:
        (trainer,) = cluster.start().trainers
        expected = trainer.fetch()[0]
        ids = np.arange(ROWS)
        gate = threading.Barrier(4)

        def pull():
            gate.wait(timeout=PATIENCE_S)
            trainer.pull(ids)
            np.testing.assert_array_equal(trainer.table, expected)

        run_all([pull] * 4)
        assert trainer.client.stats()["rows_pulled"] == ROWS


def test_optimizer_config():
    config = _core.OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True)
    assert config == _core.OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True)
    assert config != _core.OptimizerConfig("sgd", lr=0.2, momentum=0.9, nesterov=True)
    assert hash(config) == hash(
        _core.OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True)
    )
    assert (config.kind, config.lr, config.nesterov) == ("sgd", 0.1, True)
    assert "momentum=0.9" in repr(config)
    with pytest.raises(errors.InvalidArgumentError, match="sdg"):
        _core.OptimizerConfig("sdg", lr=0.1)
    with pytest.raises(errors.InvalidArgumentError):
        _core.OptimizerConfig("sgd", lr=-1.0)
    with pytest.raises(TypeError, match="lr"):
        _core.OptimizerConfig("sgd")
    assert _core.state_elements(config, 12, 4) == 12


def test_owners_of_keys_are_spread():
    owners = np.array(_core.owner_of_keys(list(range(3000)), "a", 3))
    assert (np.bincount(owners) > 800).all()
    assert (owners != _core.owner_of_keys(list(range(3000)), "b", 3)).any()
