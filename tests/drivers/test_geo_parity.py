# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Geo with one trainer is plain torch, with any of its optimizers."""

from __future__ import annotations

import pytest
import torch
from geo_cases import (
    Moving,
    geo,
    gradients,
    put_gradients,
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
    reference,
    run,
    split,
)

import torch_cpudist as cpudist


def alone(body, servers=0):
    return run(body, 1, servers)[0]


def train_rule(make, batches, servers=0, table=True, dtype=torch.float32, **options):
    """One trainer under Geo; ``make`` builds the optimizers of a model."""

    def body(context):
        model = Model(dtype, table)
        opt = cpudist.DistributedOptimizer(make(model), model, geo(3), **options)
        for step in range(len(batches)):
            opt.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            opt.step()
        opt.flush()
        return copy_of(model)

    return alone(body, servers)


@pytest.mark.parametrize("name", RULES)
def test_one_trainer_equals_torch(name):
    make = lambda model: build(RULES[name], model)  # noqa: E731
    found = train_rule(make, Batches(1))
    expected, allowed = reference(name, 1)
    assert largest_difference(found, expected) <= allowed
    for servers in (1, 2):
        assert_same_bits(found, train_rule(make, Batches(1), servers))


@pytest.mark.parametrize("name", [name for name in RULES if name != "sparse_adam"])
def test_dense_float64_equals_torch(name):
    batches, dtype = Batches(1, torch.float64), torch.float64
    make = lambda model: build(RULES[name], model)  # noqa: E731
    found = train_rule(make, batches, 2, table=False, dtype=dtype)
    expected, allowed = reference(name, 1, dtype, table=False)
    assert largest_difference(found, expected) <= allowed


OTHERS = {
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.02, centered=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=0.02, maximize=True),
}


def beside_adagrad(build_dense):
    """An optimizer for what is dense, and Adagrad on tables."""

    def make(model):
        dense, tables = split(model)
        return [build_dense(dense), torch.optim.Adagrad(tables, lr=0.1)]

    return make


@pytest.mark.parametrize("name", OTHERS)
def test_any_optimizer_runs_on_dense_parameters(name):
    make, batches = beside_adagrad(OTHERS[name]), Batches(1)
    found = train_rule(make, batches, 2)
    model = Model()
    inners = make(model)
    for step in range(len(batches)):
        model.zero_grad()
        loss_of(model, batches.part(step, 0)).backward()
        for inner in inners:
            inner.step()
    assert largest_difference(found, copy_of(model)) <= 1e-6


def test_any_optimizer_runs_beside_others():
    """Two trainers: the model learns, and all agree in the end."""

    def body(context):
        model = Model()
        inners = beside_adagrad(torch.optim.NAdam)(model)
        opt = cpudist.DistributedOptimizer(inners, model, geo(3))
        batches = Batches(2)
        losses = []
        for step in range(len(batches)):
            opt.zero_grad()
            loss = loss_of(model, batches.part(step % 5, context.trainer_rank))
            loss.backward()
            opt.step()
            losses.append(loss.item())
        opt.leave()
        context.barrier()
        opt.flush()
        return copy_of(model), losses

    results = run(body, 2, 2)
    assert_same_bits(results[0][0], results[1][0])
    for _, losses in results:
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


REFUSED = {
    "Adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "maximize": lambda model: torch.optim.SGD(model.parameters(), maximize=True),
    "LBFGS": lambda model: torch.optim.LBFGS(split(model)[0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name(name):
    def body(context):
        model = Model()
        with pytest.raises(cpudist.UnsupportedOptimizerError, match=name):
            cpudist.DistributedOptimizer(REFUSED[name](model), model, geo())

    alone(body)


@pytest.mark.parametrize("over_inner", [False, True])
def test_schedules_and_groups(over_inner):
    def make(model):
        dense, tables = split(model)
        groups = [{"params": dense, "lr": 0.05}, {"params": tables, "eps": 1e-3}]
        return torch.optim.Adagrad(groups, lr=0.2)

    def steps(model, inner, opt):
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
        batches = Batches(1, steps=20)
        for step in range(20):
            opt.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            opt.step()
            schedule.step()
        return copy_of(model)

    def body(context):
        model = Model()
        inner = make(model)
        opt = cpudist.DistributedOptimizer(inner, model, geo())
        return steps(model, inner if over_inner else opt, opt)

    model = Model()
    inner = make(model)
    assert largest_difference(alone(body), steps(model, inner, inner)) <= 1e-6


@pytest.mark.parametrize(
    "clip",
    [cpudist.ClipNorm(0.4), cpudist.ClipTensorNorm(0.2), cpudist.ClipValue(0.05)],
)
def test_clipping_is_that_of_the_trainers_own_gradient(clip):
    make = lambda model: build(RULES["adagrad"], model)  # noqa: E731
    found = train_rule(make, Batches(1, steps=15), clip=clip)

    def body(context):
        model = Model()
        opt = cpudist.DistributedOptimizer(make(model), model, geo())
        for step in range(15):
            opt.zero_grad()
            loss_of(model, Batches(1, steps=15).part(step, 0)).backward()
            if isinstance(clip, cpudist.ClipNorm):
                cpudist.clip_grad_norm_(model.parameters(), clip.max_norm)
            elif isinstance(clip, cpudist.ClipTensorNorm):
                for parameter in model.parameters():
                    cpudist.clip_grad_norm_(parameter, clip.max_norm)
            else:
                model.bag.weight.grad = model.bag.weight.grad.coalesce()
                for parameter in model.parameters():
                    grad = parameter.grad
                    grad = grad.values() if grad.is_sparse else grad
                    grad.clamp_(-clip.value, clip.value)
            opt.step()
        return copy_of(model)

    assert largest_difference(found, alone(body)) <= 1e-7
    assert largest_difference(found, train_rule(make, Batches(1, steps=15))) > 1e-3


def test_closures_accumulation_and_autocast():
    batches = Batches(1, steps=16)

    def steps(model, opt):
        for step in range(0, 16, 2):
            opt.zero_grad()
            for part in (step, step + 1):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, batches.part(part, 0))
                (loss / 2).backward()
            loss = opt.step(lambda: torch.tensor(3.0))
            assert float(loss) == 3.0
        return copy_of(model)

    def body(context):
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return steps(model, cpudist.DistributedOptimizer(inner, model, geo()))

    model = Model()
    expected = steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert largest_difference(alone(body), expected) <= 1e-6


def test_steps_without_a_gradient_change_nothing():
    def body(context):
        model = Model()
        inner = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        opt = cpudist.DistributedOptimizer(inner, model, geo(2))
        before = copy_of(model)
        for _ in range(5):
            opt.step()
        opt.flush()
        assert_same_bits(before, copy_of(model))
        assert opt.rounds > 0
        context.barrier()

    run(body, 2)


def test_gradients_are_there_again_after_a_step():
    """The table's is hidden while torch steps; also when torch's step fails."""

    def body(context):
        model = Moving()
        opt = wrapped(model, geo())
        put_gradients(model, gradients(1))
        grads = [parameter.grad for parameter in model.parameters()]
        opt.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))

        def fail(*_):
            raise RuntimeError("out of luck")

        hook = opt.inners[0].register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            opt.step()
        hook.remove()
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
        with pytest.raises(cpudist.ModelChangedError):
            opt.inners[0].step()
        opt.step()

    alone(body)


def test_compiled_models_train():
    def body(context):
        model = Model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = cpudist.DistributedOptimizer(inner, model, geo())
        compiled = torch.compile(model, backend="eager")
        for step in range(3):
            opt.zero_grad()
            loss_of(compiled, Batches(1).part(step, 0)).backward()
            opt.step()
        return copy_of(model)

    model = Model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inner.zero_grad()
        loss_of(model, Batches(1).part(step, 0)).backward()
        inner.step()
    assert largest_difference(alone(body), copy_of(model)) <= 1e-6
