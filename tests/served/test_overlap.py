# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Dense gradients that go while backward computes others change no bit of a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sync_cases import (
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    loss_of,
    run,
)

import torch_cpudist as cpudist
from torch_cpudist import _core
from torch_cpudist.served import early

STEPS = 12
SMALL = cpudist.Sharding(min_block_size=8)
# Links that stand for a network by their faults.
FAULTS = {"drop": 0.1, "duplicate": 0.1, "reorder": 0.1, "cut": 0.01}
QUIET = {"duplicate": 1e-9}


@pytest.fixture(autouse=True)
def _every_gradient_is_worth_a_frame(monkeypatch):
    monkeypatch.setattr(early, "LEAST_BYTES", 1)


def network(**faults: float) -> _core.InprocNetwork:
    return _core.InprocNetwork(_core.FaultPlan(seed=23, **(faults or QUIET)))


# -- what becomes of a gradient between backward and step ------------------------------


def untouched(model: Model, step: int, backward: Any) -> None:
    backward()


def accumulated(model: Model, step: int, backward: Any) -> None:
    backward()
    backward()


def clipped(model: Model, step: int, backward: Any) -> None:
    backward()
    dense = [p for p in model.parameters() if p.grad is None or not p.grad.is_sparse]
    torch.nn.utils.clip_grad_norm_(dense, 0.1)


def scaled_behind_autograd(model: Model, step: int, backward: Any) -> None:
    backward()
    model.first.weight.grad.data.mul_(0.5)


def replaced(model: Model, step: int, backward: Any) -> None:
    backward()
    model.last.weight.grad = model.last.weight.grad * 2


def withdrawn(model: Model, step: int, backward: Any) -> None:
    backward()
    if step % 3 == 1:
        model.first.bias.grad = None


def thrown_away(model: Model, step: int, backward: Any) -> None:
    backward()
    if step % 2:
        model.zero_grad()


def begun_anew(model: Model, step: int, backward: Any) -> None:
    backward()
    if step % 2:
        model.zero_grad()
        backward()


FATES = {
    fate.__name__: fate
    for fate in (
        *(untouched, accumulated, clipped, scaled_behind_autograd),
        *(replaced, withdrawn, thrown_away, begun_anew),
    )
}


def train(
    trainers: int,
    servers: int,
    fate: Any,
    links: _core.InprocNetwork | None,
    strategy: Any = None,
    clip: Any = None,
    **variables: str,
) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """What every trainer ends with, and its counters."""
    batches = Batches(
        trainers,
        steps=STEPS,
        sizes=lambda step, rank: 0 if (step + rank) % 5 == 4 else 3 + rank,
    )

    def body(context: cpudist.Context) -> Any:
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["adam"], model),
            model,
            strategy=strategy or cpudist.Sync(sharding=SMALL),
            clip=clip,
        )
        for step in range(STEPS):
            batch = batches.part(step, context.trainer_rank)
            optimizer.zero_grad()
            if len(batch[2]):
                fate(model, step, lambda batch=batch: loss_of(model, batch).backward())
            optimizer.step(samples=len(batch[2]))
        optimizer.flush()
        return copy_of(model), optimizer.stats()

    return run(body, trainers, servers, network=links, variables=variables)


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 2), (3, 2)])
def test_a_step_is_that_of_its_push_alone(fate, trainers, servers):
    plain = train(trainers, servers, FATES[fate], None)
    overlapped = train(trainers, servers, FATES[fate], network(**FAULTS))
    for (ours, counted), (theirs, none) in zip(overlapped, plain, strict=True):
        assert_same_bits(ours, theirs)
        assert none["early_bytes"] == 0
        assert counted["early_bytes"] > 0
        # A further backward on the same batch has the same gradients.
        changes = fate not in ("untouched", "begun_anew")
        assert (counted["early_changed_bytes"] > 0) == changes


@pytest.mark.parametrize("clip", [cpudist.ClipNorm(0.5), cpudist.ClipTensorNorm(0.2)])
def test_servers_clip_by_the_norm_of_all_that_came(clip):
    plain = train(2, 2, untouched, None, clip=clip)
    overlapped = train(2, 2, untouched, network(**FAULTS), clip=clip)
    for (ours, counted), (theirs, _) in zip(overlapped, plain, strict=True):
        assert_same_bits(ours, theirs)
        assert counted["early_bytes"] > 0


def test_groups_of_half_async_overlap_too():
    strategy = cpudist.HalfAsync(group=[[0, 1]], sharding=SMALL)
    plain = train(2, 2, untouched, None, strategy)
    overlapped = train(2, 2, untouched, network(**FAULTS), strategy)
    for (ours, counted), (theirs, _) in zip(overlapped, plain, strict=True):
        assert_same_bits(ours, theirs)
        assert counted["early_bytes"] > 0


@pytest.mark.parametrize("reduce", ["reduce", "allreduce"])
def test_replicas_train_beside_hooks_that_send_early(reduce):
    def body(context: cpudist.Context) -> Any:
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, strategy=cpudist.Sync(sharding=SMALL)
        )
        batches = Batches(2, steps=STEPS, sizes=lambda step, rank: 4)
        with cpudist.ReplicaExecutor(
            model, loss_of, optimizer, 2, reduce, num_threads=1
        ) as executor:
            for step in range(STEPS // 2):
                executor.run(batches.part(step, context.trainer_rank))
        by_replicas = optimizer.stats()["early_bytes"]
        for step in range(STEPS // 2, STEPS):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            optimizer.step()
        return copy_of(model), by_replicas, optimizer.stats()["early_bytes"]

    plain = run(body, 2, 2)
    overlapped = run(body, 2, 2, network=network())
    for (ours, of_replicas, in_all), (theirs, _, none) in zip(
        overlapped, plain, strict=True
    ):
        assert_same_bits(ours, theirs)
        assert (of_replicas, none) == (0, 0)
        assert in_all > 0


def test_all_of_a_backward_goes_early_and_once():
    (_, counted), *_ = train(1, 1, untouched, network())
    model = Model()
    dense_bytes = sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if "bag" not in name
    )
    backwards = sum((step % 5) != 4 for step in range(STEPS))
    assert counted["early_bytes"] == backwards * dense_bytes
    assert counted["early_changed_bytes"] == 0


@pytest.mark.parametrize(
    ("communicator", "variables"),
    [
        ({"overlap": False}, {}),
        ({}, {"CPUDIST_COMMUNICATOR_OVERLAP": "0"}),
        ({"wire_dtype": "bf16"}, {}),
        ({}, {"CPUDIST_SERVER_MEMORY_CAP_BYTES": str(64 << 20)}),
    ],
)
def test_nothing_goes_early_where_it_must_not(communicator, variables):
    strategy = {"name": "sync", "communicator": communicator}
    for _, counted in train(2, 2, untouched, network(), strategy, **variables):
        assert counted["early_bytes"] == 0


def test_after_gradients_that_changed_nothing_goes_early_for_a_while(monkeypatch):
    monkeypatch.setattr(early, "FIRST_REST", 2)

    def body(context: cpudist.Context) -> list[int]:
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, strategy="sync"
        )
        batches = Batches(1, steps=STEPS)
        seen, before = [], 0
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            if step in (1, 4):
                model.first.weight.grad += 1.0
            optimizer.step()
            now = optimizer.stats()["early_bytes"]
            seen.append(now > before)
            before = now
        return seen

    (seen,) = run(body, 1, 1, network=network())
    # After the change of step 1 two steps rest, after that of step 4 four.
    rests = {2, 3, 5, 6, 7, 8}
    assert [step for step in range(STEPS) if not seen[step]] == sorted(rests)


def between(
    trainers: int, act: Any, links: _core.InprocNetwork | None, **options: Any
) -> list[Any]:
    """What trainers end with that do something between a backward and its step."""

    def body(context: cpudist.Context) -> Any:
        model = Model(table=False)  # a row has to be pulled again for its gradient
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["adam"], model), model, strategy=cpudist.Sync(sharding=SMALL)
        )
        batches = Batches(trainers, steps=STEPS)
        act(optimizer, -1)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, context.trainer_rank)).backward()
            act(optimizer, step)
            optimizer.step()
        optimizer.flush()
        return copy_of(model), optimizer.stats()["early_bytes"]

    return run(body, trainers, 2, network=links, **options)


def waits(optimizer: cpudist.DistributedOptimizer, step: int) -> None:
    if step % 3 == 1:
        cpudist.barrier()


def leaves(optimizer: cpudist.DistributedOptimizer, step: int) -> None:
    if step % 3 == 1:
        optimizer.leave()
        cpudist.barrier()


@pytest.mark.parametrize("act", [waits, leaves])
def test_a_step_follows_what_comes_between_it_and_its_backward(act):
    overlapped = between(2, act, network(**FAULTS))
    for (ours, early_bytes), (theirs, none) in zip(
        overlapped, between(2, act, None), strict=True
    ):
        assert early_bytes > 0
        assert none == 0
        assert_same_bits(ours, theirs)


def test_a_step_follows_a_snapshot_that_was_loaded_after_its_backward(tmp_path):
    def loads(optimizer: cpudist.DistributedOptimizer, step: int) -> None:
        if step < 0:
            optimizer.resume(every_steps=1000)
        if step == 2:
            optimizer.save_snapshot("here")
        if step == 7:  # the round is an earlier one from here on
            optimizer.load_snapshot("here")

    found = []
    for folder, links in (("early", network(**FAULTS)), ("plain", None)):
        variables = {"CPUDIST_SNAPSHOT_DIR": str(tmp_path / folder)}
        found.append(between(2, loads, links, variables=variables))
    for (ours, early_bytes), (theirs, _) in zip(*found, strict=True):
        assert early_bytes > 0
        assert_same_bits(ours, theirs)


def test_a_link_that_has_failed_is_told_by_the_step_and_not_by_backward(monkeypatch):
    asked = []

    class Size(int):
        """What gradients are compared with when they are ready."""

        def __gt__(self, other: int) -> bool:
            asked.append(other)
            return int(self) > other

    monkeypatch.setattr(early, "LEAST_BYTES", Size(1))

    def body(context: cpudist.Context) -> None:
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, strategy="sync"
        )
        loss = loss_of(model, Batches(1, steps=1).part(0, 0))
        context.endpoints.client.abort("it is over")
        loss.backward()
        assert len(asked) == 1  # the others are not tried any more
        with pytest.raises(cpudist.ClosedError, match="it is over"):
            optimizer.step()

    with pytest.raises(cpudist.ClosedError, match="it is over"):
        run(body, 1, 1, network=network())  # so does its shutdown
    assert asked


def test_the_model_is_as_it_was_once_the_optimizer_is_closed():
    def body(context: cpudist.Context) -> tuple[int, int]:
        model = Model()
        optimizer = cpudist.DistributedOptimizer(
            build(RULES["sgd"], model), model, strategy="sync"
        )
        hooks = model.first.weight._post_accumulate_grad_hooks
        during = len(hooks)
        optimizer.close()
        return during, len(hooks)

    assert run(body, 1, 1, network=network()) == [(1, 0)]


def test_async_has_nothing_to_overlap():
    with pytest.raises(cpudist.ConfigurationError, match="overlap"):
        cpudist.Async(communicator={"overlap": False})
    with pytest.raises(cpudist.ConfigurationError, match="overlap"):
        cpudist.Geo(communicator={"overlap": False})
