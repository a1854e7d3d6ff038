# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Replicas under a DistributedOptimizer: they average first, then push once."""

from __future__ import annotations

import pytest
import torch
from replica_cases import allowed, batch_of, by_replicas, loss_of
from sync_cases import (
    RULES,
    Model,
    assert_same_bits,
    build,
    copy_of,
    largest_difference,
    run,
)
from torch import nn

import torch_cpudist as cpudist

STEPS, TRAINERS = 10, 2


def part_of(batch, rank, sizes):
    begin = sum(sizes[:rank])
    return tuple(tensor[begin : begin + sizes[rank]] for tensor in batch)


def train(strategy, rule="adagrad", sizes=(6, 6), servers=0, **options):
    """Every trainer's model after a few steps of two replicas on its part."""
    by_samples = options.pop("by_samples", False)

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES[rule], model), model, strategy, clip=options.get("clip")
        )
        with cpudist.ReplicaExecutor(
            model,
            loss_of,
            optimizer,
            2,
            options.get("reduce"),
            num_threads=1,
            by_samples=by_samples,
        ) as executor:
            for step in range(STEPS):
                batch = batch_of(step, sum(sizes))
                executor.run(part_of(batch, context.trainer_rank, sizes))
            pushes = optimizer.stats()["steps"]
        context.barrier()
        optimizer.flush()
        return copy_of(model), pushes

    return run(body, len(sizes), servers)


def reference(rule, samples, steps=STEPS):
    return allowed(
        lambda m: build(RULES[rule], m),
        lambda step: samples,
        torch.float32,
        True,
        steps=steps,
    )


@pytest.mark.parametrize("reduce", ["reduce", "allreduce"])
@pytest.mark.parametrize(
    ("sizes", "by_samples"), [((6, 6), False), ((9, 5), True)], ids=["even", "uneven"]
)
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_two_trainers_of_two_replicas_are_one_process(rule, sizes, by_samples, reduce):
    expected, difference = reference(rule, sum(sizes))
    found = train("sync", rule, sizes, by_samples=by_samples, reduce=reduce)
    for model, pushes in found:
        assert largest_difference(model, expected) <= difference
        assert pushes == STEPS


def test_the_same_bits_in_every_run():
    first, second = train("sync"), train("sync")
    assert_same_bits(first[0][0], second[0][0])
    assert_same_bits(first[0][0], first[1][0])


@pytest.mark.parametrize(
    "strategy",
    [
        "sync",
        "async",
        "geo",
        "half_async",
        "allreduce",
        {"name": "hybrid", "dense": "allreduce", "sparse": "sync"},
        {"name": "hybrid", "dense": "sync", "sparse": "geo"},
    ],
    ids=str,
)
def test_one_trainer_is_plain_torch_under_every_strategy(strategy):
    if strategy == "async":  # the next step waits for the last one
        strategy = {"name": "async", "max_staleness": 0}
    expected, difference = reference("adagrad", 8)
    found = train(strategy, sizes=(8,), servers=1)
    assert largest_difference(found[0][0], expected) <= difference


def test_local_sgd_of_one_trainer():
    model = Model(table=False)

    def body(_):
        own = Model(table=False)
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["adagrad"], own), own, cpudist.LocalSGD(every=2)
        )
        with cpudist.ReplicaExecutor(own, loss_of, optimizer, 2) as executor:
            for step in range(STEPS):
                executor.run(batch_of(step, 8))
        return copy_of(own)

    plain = by_replicas(
        lambda m: build(RULES["adagrad"], m),
        lambda step: 8,
        torch.float32,
        False,
        steps=STEPS,
    )
    found = run(body, 1)[0]
    assert largest_difference(found, plain) < 1e-6
    assert largest_difference(found, copy_of(model)) > 0


def test_replicas_of_groups_that_do_not_wait():
    # Each process a group of its own: the ancestor's half-async, exactly.
    strategy = cpudist.HalfAsync(group=[[0], [1]])
    assert all(pushes == STEPS for _, pushes in train(strategy))


def test_clipping_is_of_the_mean():
    clip = cpudist.ClipNorm(0.05)
    whole = train("sync", "sgd", (12,), servers=1, clip=clip)[0][0]
    two = train("sync", "sgd", (6, 6), clip=clip)[0][0]
    free = train("sync", "sgd", (6, 6))[0][0]
    assert largest_difference(two, whole) < 1e-5
    assert largest_difference(two, free) > 1e-2


def test_geo_counts_the_batches_of_all_replicas():
    def exchanges(replicas):
        def body(context):
            model = Model()
            strategy = cpudist.Geo(push_every=8, exchange_budget=1.0)
            optimizer = cpudist.DistributedOptimizer(
                build(RULES["sgd"], model), model, strategy
            )
            if context.trainer_rank > 0:
                return 0
            begun = 0
            with cpudist.ReplicaExecutor(model, loss_of, optimizer, replicas) as many:
                for step in range(8):
                    many.run(batch_of(step, 8))
                    # An exchange begins in the step in which it is due.
                    begun += optimizer.driver.steps == 0
                    optimizer.flush("none")
            return begun

        return run(body, 2)[0]

    # flush() hands on as well, so that no more steps than it are ever open.
    assert [exchanges(count) for count in (1, 4, 8)] == [0, 0, 8]


def test_state_is_counted_where_it_is():
    def held(strategy, servers):
        def body(context):
            model = Model()
            optimizer = cpudist.DistributedOptimizer(
                build(RULES["adagrad"], model), model, strategy
            )
            with cpudist.ReplicaExecutor(model, loss_of, optimizer, 2) as executor:
                executor.run(batch_of(0, 8))
                sizes = {n: p.numel() for n, p in model.named_parameters()}
                return executor.stats()["state_bytes"], sizes, model

        return run(body, 2, servers)[0]

    found, sizes, model = held(cpudist.Geo(push_every=4), 1)
    tables = [m for m in model.modules() if getattr(m, "sparse", False)]
    rows = sum(table.weight.shape[0] for table in tables)
    assert rows > 0
    dense = len(sizes) - len(tables)
    # An accumulator as large as the model; a step count per row and dense parameter.
    assert found == 4 * (sum(sizes.values()) + rows + dense)
    assert held(cpudist.Sync(), 1)[0] == 0


def test_geo_counts_the_replicas_that_step():
    """Executors that only look on do not count, nor one that is closed."""

    def body(context):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, cpudist.Geo(push_every=1000)
        )
        counts = []
        with cpudist.ReplicaExecutor(model, loss_of, optimizer, 2) as many:
            many.run(batch_of(0, 8))
            with cpudist.ReplicaExecutor(model, loss_of, optimizer, 3) as other:
                other.evaluate(batch_of(0, 6))
                many.run(batch_of(1, 8))
            many.run(batch_of(2, 8))
            counts.append(optimizer.driver.batches)
        optimizer.zero_grad()
        loss_of(model, batch_of(3, 4)).backward()
        optimizer.step()
        return [*counts, optimizer.driver.batches]

    assert run(body, 2) == [[6, 7], [6, 7]]


def test_tables_are_never_dense():
    seen = []

    def body(_):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, "sync"
        )
        step = optimizer.step

        def look(*args, **options):
            seen.append(model.bag.weight.grad)
            return step(*args, **options)

        optimizer.step = look
        with cpudist.ReplicaExecutor(model, loss_of, optimizer, 3) as executor:
            executor.run(batch_of(0, 12))

    run(body, 1)
    keys = seen[0]._indices()[0]
    assert seen[0].layout == torch.sparse_coo
    assert len(keys) == len(keys.unique())
    assert seen[0]._values().shape == (len(keys), 4)


def test_replicas_look_up_one_table_at_once():
    rows, dim = 2000, 4

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(rows, dim, sparse=True)
            self.bag = nn.EmbeddingBag(rows, dim, sparse=True, mode="sum")
            self.bag.weight = self.table.weight

        def forward(self, ids):
            return self.table(ids).sum((1, 2)) + self.bag(ids).sum(1)

    def train_with(replicas, network=None):
        def body(_):
            torch.manual_seed(0)
            model = Two()
            optimizer = cpudist.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model, "sync"
            )
            generator = torch.Generator().manual_seed(1)
            with cpudist.ReplicaExecutor(
                model, lambda net, ids: net(ids).square().mean(), optimizer, replicas
            ) as executor:
                for _ in range(15):
                    executor.run(torch.randint(0, rows, (64, 5), generator=generator))
            optimizer.flush()
            return copy_of(model)

        return run(body, 1, 2, network=network)[0]

    from torch_cpudist import _core

    delayed = _core.InprocNetwork(_core.FaultPlan(delay=0.5, delay_ms_max=2, seed=5))
    plain = train_with(1)
    assert largest_difference(train_with(4), plain) < 1e-5
    assert largest_difference(train_with(4, delayed), plain) < 1e-5


def test_prefetched_rows_are_the_replicas_too():
    def train_with(prefetched):
        def body(_):
            model = Model()
            optimizer = cpudist.DistributedOptimizer(
                build(RULES["adagrad"], model), model, "sync"
            )
            batches = [batch_of(step, 8) for step in range(STEPS)]
            loader = batches
            if prefetched:
                loader = cpudist.data.prefetch(
                    batches, optimizer, ids=lambda b: {model.bag: b[0]}, depth=2
                )
            with cpudist.ReplicaExecutor(model, loss_of, optimizer, 2) as executor:
                for batch in loader:
                    executor.run(batch)
            hits = optimizer.stats()["prefetch_hits"]
            optimizer.flush()
            return copy_of(model), hits

        return run(body, 1, 2)[0]

    (plain, none), (found, hits) = train_with(False), train_with(True)
    assert_same_bits(found, plain)
    assert none == 0
    assert hits > 0


def test_replicas_may_find_a_weight_that_has_moved():
    def body(_):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, "sync"
        )
        with cpudist.ReplicaExecutor(model, loss_of, optimizer, 4) as executor:
            for step in range(STEPS):
                model.bag.weight.data = model.bag.weight.data.clone()
                executor.run(batch_of(step, 16))
        optimizer.flush()
        return copy_of(model)

    expected, difference = reference("sgd", 16)
    assert largest_difference(run(body, 1)[0], expected) <= difference


def test_settings_come_from_the_strategy_and_the_environment():
    def body(_):
        model = Model()
        strategy = cpudist.Sync(
            replicas={"count": 3, "reduce": "allreduce", "num_threads": 2}
        )
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, strategy
        )
        with cpudist.ReplicaExecutor(model, loss_of, optimizer) as executor:
            assert executor.num_threads == 2
            return executor.replicas, executor.reduce

    assert run(body, 1)[0] == (3, "allreduce")
    assert run(body, 1, variables={"CPU_NUM": "2"})[0] == (2, "allreduce")
    more = {"CPU_NUM": "2", "CPUDIST_REPLICAS_COUNT": "4"}
    assert run(body, 1, variables=more)[0] == (4, "allreduce")


def test_a_closed_optimizer_ends_the_executors_work():
    def body(_):
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, "sync"
        )
        executor = cpudist.ReplicaExecutor(model, loss_of, optimizer, 2)
        executor.run(batch_of(0, 6))
        optimizer.close()
        with pytest.raises(cpudist.ClosedError):
            executor.run(batch_of(1, 6))
        executor.close()

    run(body, 1)
