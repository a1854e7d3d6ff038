# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""DistributedOptimizer is used as the optimizers it wraps: schedulers, groups, clip."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import (
    ALLOWED,
    STEPS,
    alone,
    equals_one_process,
    linear,
    sgd,
    wrapped,
)
from sync_cases import (
    RULES,
    Batches,
    Model,
    assert_same_bits,
    build,
    copy_of,
    largest_difference,
    loss_of,
    run,
    split,
)
from torch.optim import lr_scheduler

import torch_cpudist as cpudist

# ---- schedulers, closures, accumulation, autocast ----------------------------------


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.2, total_steps=STEPS, cycle_momentum=False
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("over", ["outer", "inner"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("error:.*lr_scheduler")
def test_schedulers(name, over):
    def train(model, optimizer, scheduler, batch):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            scheduler.step()

    def plain_run(model, batches):
        optimizer = sgd(model)
        train(model, optimizer, SCHEDULES[name](optimizer), batches.joined)

    def server_run(model, batches, rank):
        inner = sgd(model)
        scheduler = SCHEDULES[name](inner) if over == "inner" else None
        optimizer = wrapped(model, inner)
        scheduler = scheduler or SCHEDULES[name](optimizer)
        train(model, optimizer, scheduler, lambda step: batches.part(step, rank))
        optimizer.flush()

    equals_one_process(plain_run, server_run)


def test_a_schedule_of_betas_over_the_wrapping_optimizer():
    """Schedulers find out from its defaults whether there are betas or a momentum."""

    def train(model, optimizer, outer):
        schedule = lr_scheduler.OneCycleLR(outer, 0.2, total_steps=STEPS)
        for step in range(STEPS):
            outer.zero_grad()
            model(torch.full((1, 3), float(step + 1))).square().mean().backward()
            outer.step()
            schedule.step()

    plain = linear()
    optimizer = torch.optim.Adam(plain.parameters())
    train(plain, optimizer, optimizer)

    def body():
        model = linear()
        inner = torch.optim.Adam(model.parameters())
        train(model, inner, wrapped(model, inner))
        assert largest_difference(copy_of(model), copy_of(plain)) <= ALLOWED

    alone(body)


def test_a_closure_is_called_with_gradients_enabled():
    def body():
        model = linear()
        optimizer = wrapped(model)
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
            calls.append(loss.item())
            return loss

        with torch.no_grad():
            first = optimizer.step(closure)
        second = optimizer.step(closure)
        assert calls == [first.item(), second.item()]
        assert second < first

    alone(body)


def test_accumulated_gradients():
    def plain_run(model, batches):
        optimizer = sgd(model)
        for step in range(0, STEPS, 2):
            optimizer.zero_grad()
            for part in (step, step + 1):
                (loss_of(model, batches.joined(part)) / 2).backward()
            optimizer.step()

    def server_run(model, batches, rank):
        optimizer = wrapped(model)
        for step in range(0, STEPS, 2):
            optimizer.zero_grad()
            for part in (step, step + 1):
                (loss_of(model, batches.part(part, rank)) / 2).backward()
            optimizer.step()
        optimizer.flush()

    equals_one_process(plain_run, server_run)


def test_autocast_to_bfloat16():
    """Gradients are float32; their parts differ by roundings of bfloat16."""

    def train(model, optimizer, parts):
        for part in parts:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, part)
            loss.backward()
            optimizer.step()

    batches = Batches(1, steps=STEPS)
    plain = Model()
    train(plain, sgd(plain), [batches.part(s, 0) for s in range(STEPS)])

    def body(context):
        model = Model()
        optimizer = wrapped(model)
        train(model, optimizer, [batches.part(s, 0) for s in range(STEPS)])
        optimizer.flush()
        return copy_of(model)

    # Both trainers have the same batch, so their mean is exact.
    for state in run(body, 2):
        assert largest_difference(state, copy_of(plain)) <= ALLOWED


# ---- groups and lists --------------------------------------------------------------


def test_groups_with_their_own_options():
    def make(model):
        dense, tables = split(model)
        return torch.optim.Adagrad(
            [
                {"params": dense[:2], "lr": 0.2},
                {"params": [*dense[2:], *tables], "eps": 1e-3},
            ],
            lr=0.05,
        )

    def plain_run(model, batches):
        optimizer = make(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batches.joined(step)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9

    def server_run(model, batches, rank):
        optimizer = wrapped(model, make(model))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, rank)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.flush()

    equals_one_process(plain_run, server_run, allowed=1e-5)


def test_a_list_of_optimizers_shares_its_groups():
    def body():
        model = Model()
        inners = build(RULES["sparse_adam"], model)
        optimizer = wrapped(model, inners)
        assert isinstance(optimizer, torch.optim.Optimizer)
        groups = [group for inner in inners for group in inner.param_groups]
        assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
        state = optimizer.state_dict()
        assert [len(one["state"]) for one in state["optimizers"]] == [4, 1]
        optimizer.load_state_dict(state)
        with pytest.raises(cpudist.InvalidArgumentError, match=r"1 optimizers.*2"):
            optimizer.load_state_dict(state["optimizers"][0])

    alone(body)


def test_trainers_with_different_options_are_told_which():
    def body(context):
        model = linear()
        optimizer = wrapped(model, sgd(model, lr=0.1 + context.trainer_rank))
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(cpudist.ConfigMismatchError) as caught:
            optimizer.step()
        for expected in ("lr", "0.1", "1.1"):
            assert expected in str(caught.value)

    with pytest.raises(cpudist.ConfigMismatchError):
        run(body, 2)


def test_trainers_of_a_round_weigh_in_the_same_way():
    def body(context):
        model = linear()
        optimizer = wrapped(model, sgd(model))
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(cpudist.ConfigMismatchError, match=r"step\(samples=\)"):
            optimizer.step(samples=32 if context.trainer_rank == 0 else None)

    run(body, 2)


# ---- clipping of the averaged gradient ---------------------------------------------


@pytest.mark.parametrize("clip", [cpudist.ClipNorm(0.5), cpudist.ClipValue(0.05)])
@pytest.mark.parametrize("trainers", [1, 3])
def test_clipping_equals_one_process(clip, trainers):
    def plain_run(model, batches):
        dense, _ = split(model)
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batches.joined(step)).backward()
            weight = model.bag.weight
            weight.grad = weight.grad.coalesce()
            if isinstance(clip, cpudist.ClipNorm):
                cpudist.clip_grad_norm_(model.parameters(), clip.max_norm)
            else:
                torch.nn.utils.clip_grad_value_(dense, clip.value)
                weight.grad.values().clamp_(-clip.value, clip.value)
            optimizer.step()

    def server_run(model, batches, rank):
        optimizer = wrapped(model, clip=clip)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, batches.part(step, rank)).backward()
            optimizer.step()
        optimizer.flush()

    if trainers == 1:
        batches = Batches(1, steps=STEPS)
        plain = Model()
        plain_run(plain, batches)

        def body(context):
            model = Model()
            server_run(model, batches, 0)
            return copy_of(model)

        state = run(body, 1, 3)[0]
        assert largest_difference(state, copy_of(plain)) <= ALLOWED
    else:
        equals_one_process(plain_run, server_run, trainers)


def test_clipping_by_samples_and_without_gradient():
    """A round of no weight or no gradient has norm 0 and goes through."""

    def body(context):
        model = linear()
        optimizer = wrapped(model, clip=cpudist.ClipNorm(1.0))
        before = copy_of(model)
        optimizer.step()
        optimizer.step(samples=0)
        assert_same_bits(before, copy_of(model))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step(samples=context.trainer_rank + 1)
        moved = torch.cat(
            [(before[k] - v).flatten() for k, v in copy_of(model).items()]
        )
        torch.testing.assert_close(moved.norm(), torch.tensor(0.1), rtol=1e-4, atol=0)

    run(body, 2)


@pytest.mark.parametrize(
    "strategy", [None, "sync", "SYNC", {"name": "sync"}, cpudist.Sync()]
)
def test_strategies_by_name(strategy):
    def body():
        optimizer = wrapped(linear(), strategy=strategy)
        assert optimizer.strategy == cpudist.Sync()

    alone(body)


def test_hooks_of_torch_run():
    def body():
        model = linear()
        optimizer = wrapped(model)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer.step()
        assert seen == ["before", "after"]

    alone(body)
