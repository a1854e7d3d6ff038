# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Executors that fail, are interrupted, are closed; their settings and their memory."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import pytest
import torch
from patience import PATIENCE_S
from replica_cases import batch_of, loss_of
from sync_cases import Model, assert_same_bits, copy_of
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.machine import host, topology

X = torch.ones(6, 2)


def executor_of(loss_fn=None, replicas=2, model=None, **options):
    model = nn.Linear(2, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = loss_fn or (lambda net, x: net(x).mean())
    return cpudist.ReplicaExecutor(model, loss_fn, optimizer, replicas, **options)


def replica_threads():
    return [t for t in threading.enumerate() if t.name.startswith("cpudist-replica")]


def test_an_exception_is_raised_in_the_caller():
    model = nn.Linear(2, 1)
    before = copy_of(model)
    ended = []

    def loss_fn(net, x):
        if len(x) == 1:
            raise KeyError("of this part")
        ended.append(len(x))
        return net(x).mean()

    with executor_of(loss_fn, 3, model) as executor:
        with pytest.raises(KeyError, match="of this part") as caught:
            executor.run_parts([X[:2], X[:1], X[:3]])
        assert caught.value.__notes__ == ["in replica 1 of 3"]
        assert sorted(ended) == [2, 3]
        assert_same_bits(copy_of(model), before)
        # Nothing of the failed step is in the next one.
        executor.run(X)
        with executor_of(None, 3, other := nn.Linear(2, 1)) as fresh:
            other.load_state_dict(before)
            fresh.run(X)
        assert_same_bits(copy_of(model), copy_of(other))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda out: None, "NoneType without a loss"),
        (lambda out: {"los": out.mean()}, "dict without a loss"),
        (lambda out: out, "expected one number"),
    ],
)
def test_what_is_no_loss_is_refused(returned, message):
    with (
        executor_of(lambda net, x: returned(net(x))) as executor,
        pytest.raises(cpudist.InvalidArgumentError, match=message),
    ):
        executor.run(X)


def test_batches_that_are_too_small():
    with executor_of(replicas=3) as executor:
        with pytest.raises(cpudist.BatchTooSmallError, match="CPU_NUM=2"):
            executor.run(X[:2])
        with pytest.raises(cpudist.InvalidArgumentError, match="2 parts for 3"):
            executor.run_parts([X, X])
        assert len(executor.evaluate(X[:2])) == 2


def test_trainers_are_not_weighed_where_there_are_none():
    with pytest.raises(cpudist.InvalidArgumentError, match="DistributedOptimizer"):
        executor_of(by_samples=True)


def test_an_interrupt_leaves_a_usable_executor():
    inside, go_on = threading.Barrier(3), threading.Event()

    def loss_fn(net, x):
        if not go_on.is_set():
            inside.wait(PATIENCE_S)
            go_on.wait(PATIENCE_S)
        return net(x).mean()

    def interrupt():
        inside.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)

    model = nn.Linear(2, 1)
    before = copy_of(model)
    with executor_of(loss_fn, 2, model) as executor:
        thread = threading.Thread(target=interrupt)
        thread.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            executor.run(X)
        assert time.monotonic() - began < 10
        thread.join()
        assert_same_bits(copy_of(model), before)
        go_on.set()
        executor.run(X)
        gradient = model.weight.grad.clone()
        executor.run(X)
        assert torch.equal(model.weight.grad, gradient)


def test_one_call_at_a_time():
    made = []

    def again(net, x):
        made[0].evaluate(x)

    with executor_of(again) as executor:
        made.append(executor)
        with pytest.raises(cpudist.InvalidArgumentError, match="one thread at a time"):
            executor.run(X)


def test_threads_end_with_the_executor():
    with executor_of(replicas=3) as executor:
        executor.run(X)
        assert len(replica_threads()) == 3
    assert not replica_threads()
    executor.close()
    for call in (executor.run, executor.predict, executor.evaluate):
        with pytest.raises(cpudist.ClosedError):
            call(X)
    forgotten = executor_of(replicas=2)
    forgotten.run(X)
    threads = replica_threads()
    del forgotten
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not replica_threads()


def test_a_forked_child_makes_its_own():
    with executor_of() as executor:
        executor.run(X)
        child = os.fork()
        if child == 0:
            try:
                executor.run(X)
            except cpudist.ForkedProcessError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_torch_threads_are_the_replicas_own():
    seen = []
    before = torch.get_num_threads()
    lock = threading.Lock()

    def loss_fn(net, x):
        with lock:
            seen.append(torch.get_num_threads())
        return net(x).mean()

    with executor_of(loss_fn, num_threads=3) as executor:
        assert torch.get_num_threads() == before
        executor.run(X)
    assert seen == [3, 3]
    assert torch.get_num_threads() == before


def test_settings_without_init(monkeypatch):
    with executor_of(replicas=None) as executor:
        assert executor.replicas == topology.physical_cores() <= host.cores()
        assert (executor.reduce, executor.num_threads) == ("reduce", 1)
    monkeypatch.setenv("CPU_NUM", "3")
    monkeypatch.setenv("CPUDIST_REPLICAS_REDUCE", "allreduce")
    monkeypatch.setenv("CPUDIST_THREADS", "2")
    with executor_of(replicas=5) as executor:
        found = executor.replicas, executor.reduce, executor.num_threads
        assert found == (3, "allreduce", 2)
    monkeypatch.setenv("CPU_NUM", "0")
    with pytest.raises(cpudist.ConfigurationError, match="CPU_NUM=0"):
        executor_of()
    monkeypatch.delenv("CPU_NUM")
    for options in ({"replicas": 0}, {"reduce": "reduse"}, {"gradient_scale": "men"}):
        with pytest.raises((cpudist.ConfigurationError, cpudist.InvalidArgumentError)):
            executor_of(**options)


def test_memory_of_both_modes():
    """Reduce: all once per process, but gradients once per replica."""
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 1))
    one = sum(p.numel() * 4 for p in model.parameters())
    x = torch.randn(8, 100)
    found = {}
    for reduce in ("reduce", "allreduce"):
        largest = 0
        optimizer = torch.optim.Adagrad(model.parameters())
        executor = cpudist.ReplicaExecutor(
            model, lambda net, x: net(x).mean(), optimizer, 4, reduce
        )

        def look(executor=executor):
            nonlocal largest
            largest = max(largest, executor.stats()["gradient_bytes"])

        with executor:
            executor.run(x, step=False)
            look()
            executor.run(x)
            found[reduce] = {**executor.stats(), "during": largest}
    steps = 4 * 4  # Adagrad's step counts
    plain = {"parameter_bytes": one, "gradient_bytes": one, "during": 4 * one}
    state = one + steps
    assert found["reduce"] == {**plain, "copy_bytes": 0, "state_bytes": state}
    assert found["allreduce"] == {
        **plain,
        "copy_bytes": 3 * one,
        "state_bytes": 4 * state,
    }


def test_replicas_are_pinned_to_their_cores(monkeypatch):
    mask = os.sched_getaffinity(0)
    count = min(2, len(mask))
    seen = {}

    def loss_fn(net, x):
        seen[threading.current_thread().name] = os.sched_getaffinity(0)
        return net(x).mean()

    monkeypatch.setenv("CPUDIST_PIN", "1")
    with executor_of(loss_fn, count) as executor:
        executor.run(X)
    cores = list(seen.values())
    assert len(cores) == count
    assert set().union(*cores) == mask
    assert sum(len(own) for own in cores) == len(mask)
    assert os.sched_getaffinity(0) == mask
    with pytest.raises(
        cpudist.ConfigurationError,
        match="3 replicas of this rank" if len(mask) == 2 else "CPUDIST_PIN",
    ):
        executor_of(replicas=len(mask) + 1)


def test_more_than_once_over_one_model():
    model = Model(table=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = cpudist.ReplicaExecutor(model, loss_of, optimizer, 2)
    second = cpudist.ReplicaExecutor(model, loss_of, optimizer, 3)
    with first, second:
        for step in range(3):
            first.run(batch_of(step, 6))
            second.run(batch_of(step, 6))
            inputs = batch_of(step, 6)[:2]
            assert torch.equal(first.predict(inputs), second.predict(inputs))
