# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a DistributedOptimizer trains and leaves alone, refuses, reports and closes."""

from __future__ import annotations

import time

import pytest
import torch
from optimizer_cases import ALLOWED, STEPS, alone, linear, sgd, step_on, wrapped
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
)
from torch import nn

import torch_cpudist as cpudist

# ---- what is trained, and what is left alone ---------------------------------------


def test_trainer_0_gives_the_initial_values():
    def body(context):
        model = linear()
        with torch.no_grad():
            model.weight.fill_(float(context.trainer_rank))
        wrapped(model)
        return copy_of(model)

    states = run(body, 3)
    assert all(state["weight"].eq(0).all() for state in states)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.norm(self.fc(x)) * self.frozen


def test_frozen_and_unused_parameters_and_buffers_are_the_trainers_own():
    def body(context):
        model = Normed()
        with torch.no_grad():
            model.frozen.fill_(2.0 + context.trainer_rank)
        optimizer = wrapped(model)
        generator = torch.Generator().manual_seed(context.trainer_rank)
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.flush()
        return copy_of(model)

    first, second = run(body, 2)
    assert first["frozen"].tolist() == [2.0, 2.0]
    assert second["frozen"].tolist() == [3.0, 3.0]
    assert first["unused"].tolist() == [1.0, 1.0]
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    for name in ("fc.weight", "fc.bias", "norm.weight", "norm.bias", "unused"):
        assert torch.equal(first[name], second[name]), name


def test_parameters_and_gradients_of_any_memory_format():
    def make():
        model = nn.Conv2d(2, 3, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 9)
        return model.to(memory_format=torch.channels_last)

    images = torch.arange(32.0).reshape(1, 2, 4, 4) / 32

    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()

    plain = make()
    train(plain, sgd(plain))

    def body():
        model = make()
        optimizer = wrapped(model)
        train(model, optimizer)
        assert not model.weight.is_contiguous()
        optimizer.flush()
        assert largest_difference(copy_of(model), copy_of(plain)) <= ALLOWED

    alone(body)


def test_training_before_wrapping_goes_on():
    batches = Batches(1, steps=STEPS)

    def train(model, optimizers, first, last):
        for step in range(first, last):
            model.zero_grad()
            loss_of(model, batches.part(step, 0)).backward()
            for optimizer in optimizers:
                optimizer.step()

    for name in ("adagrad", "sparse_adam", "ftrl"):
        plain = Model()
        train(plain, build(RULES[name], plain), 0, STEPS)

        def body(context, name=name):
            model = Model()
            inners = build(RULES[name], model)
            train(model, inners, 0, STEPS // 2)
            optimizer = wrapped(model, inners)
            train(model, [optimizer], STEPS // 2, STEPS)
            optimizer.flush()
            return copy_of(model)

        state = run(body, 1, 2)[0]
        assert largest_difference(state, copy_of(plain)) <= ALLOWED, name


# ---- refusals ----------------------------------------------------------------------


def test_wrong_arguments():
    def body():
        model = linear()
        with pytest.raises(cpudist.InvalidArgumentError, match="is empty"):
            cpudist.DistributedOptimizer([], model)
        with pytest.raises(
            cpudist.InvalidArgumentError, match="ClipTensorNorm or ClipV"
        ):
            wrapped(model, clip=1.0)
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="Adamax"):
            wrapped(model, torch.optim.Adamax(model.parameters()))
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="amsgrad=True"):
            wrapped(model, torch.optim.Adam(model.parameters(), amsgrad=True))
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="weight"):
            wrapped(model, torch.optim.SparseAdam(model.parameters()))
        half = nn.Linear(2, 2, dtype=torch.bfloat16)
        with pytest.raises(cpudist.UnsupportedModelError, match="bfloat16"):
            wrapped(half)
        optimizer = wrapped(model)
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="add_param_group"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(cpudist.InvalidArgumentError, match="samples must be >= 0"):
            optimizer.step(samples=-1)
        with pytest.raises(cpudist.InvalidArgumentError, match="'all', 'dense'"):
            optimizer.flush("some")
        step_on(model, optimizer)

    alone(body)


def test_options_set_later_are_checked_at_each_step():
    def body():
        model = linear()
        optimizer = wrapped(model, torch.optim.Adam(model.parameters()))
        step_on(model, optimizer)
        before = copy_of(model)
        optimizer.param_groups[0]["maximize"] = True
        with pytest.raises(cpudist.UnsupportedOptimizerError, match="maximize=True"):
            step_on(model, optimizer)
        assert_same_bits(before, copy_of(model))
        optimizer.param_groups[0]["maximize"] = False
        step_on(model, optimizer)

    alone(body)


@pytest.mark.parametrize("first", [0.0, 0.9])
def test_a_momentum_that_comes_or_goes_changes_the_state(first):
    """Servers made room for the state when the optimizer was wrapped."""

    def body():
        model = linear()
        optimizer = wrapped(model, sgd(model, momentum=first))
        step_on(model, optimizer)
        expected = optimizer.state_dict()["state"]
        optimizer.param_groups[0]["momentum"] = 0.9 - first
        with pytest.raises(cpudist.ConfigMismatchError, match="momentum"):
            step_on(model, optimizer)
        found = optimizer.state_dict()["state"]
        for i, state in expected.items():
            assert found[i].keys() == state.keys()
            for name, value in state.items():
                assert torch.equal(found[i][name], value)

    alone(body)


def test_a_sparse_gradient_on_a_dense_parameter_is_refused():
    def body():
        model = nn.ModuleDict({"fc": linear()})
        optimizer = wrapped(model)
        rows = torch.nn.functional.embedding(
            torch.tensor([0]), model["fc"].weight, sparse=True
        )
        rows.sum().backward()
        with pytest.raises(cpudist.UnsupportedModelError, match=r"'fc\.weight'.*table"):
            optimizer.step()

    alone(body)


def test_weights_written_by_others_are_refused_until_stored():
    def body(context):
        model = linear()
        optimizer = wrapped(model, sgd(model, momentum=0.5))
        step_on(model, optimizer)
        state = optimizer.state_dict()["state"]
        with torch.no_grad():
            model.weight.fill_(3.0 + context.trainer_rank)
        model(torch.ones(1, 3)).sum().backward()
        with pytest.raises(cpudist.ModelChangedError, match="first: 'weight'"):
            optimizer.step()
        optimizer.store_model()
        assert model.weight.eq(3.0).all()
        after = optimizer.state_dict()["state"]
        assert torch.equal(after[0]["momentum_buffer"], state[0]["momentum_buffer"])
        optimizer.step()
        return copy_of(model)

    first, second = run(body, 2)
    assert_same_bits(first, second)


# ---- reports and the end -----------------------------------------------------------


def test_stats_and_rounds():
    def body():
        began = time.monotonic()
        model = linear()
        optimizer = wrapped(model)
        assert (optimizer.rounds, cpudist.global_step()) == (0, 0)
        step_on(model, optimizer)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step(samples=7)
        assert (optimizer.rounds, cpudist.global_step()) == (2, 2)
        stats = optimizer.stats()
        assert (stats["steps"], stats["samples"]) == (2, 7)
        assert stats["bytes_sent"] > 2 * 8 * 4
        assert stats["bytes_received"] > 2 * 8 * 4
        assert 0 < stats["step_s"] < time.monotonic() - began
        assert 0 <= stats["round_wait_s"] <= stats["wait_s"] < time.monotonic() - began
        # A network that breaks nothing, and no tables.
        for name in ("rows_pulled", "rows_pushed", "resent", "reconnects", "queued"):
            assert stats[name] == 0, name

    alone(body)


def test_use_after_close():
    def body():
        model = linear()
        optimizer = wrapped(model)
        step_on(model, optimizer)
        optimizer.close()
        optimizer.close()
        for use in (
            optimizer.step,
            optimizer.flush,
            optimizer.leave,
            optimizer.state_dict,
            optimizer.store_model,
            optimizer.stats,
        ):
            with pytest.raises(cpudist.ClosedError):
                use()
        assert cpudist.current().optimizers() == []

    alone(body)


@pytest.mark.parametrize("same", [True, False])
def test_a_new_optimizer_over_the_same_parameters_takes_over(same):
    """Rows that were pushed but not looked up since count, as do other trainers'."""
    batches = Batches(2, steps=6)

    def fit(model, optimizers, batch, first):
        for step in range(first, first + 3):
            model.zero_grad()
            loss_of(model, batch(step)).backward()
            for optimizer in optimizers:
                optimizer.step()

    plain = Model()
    inners = build(RULES["adagrad"], plain)
    fit(plain, inners, batches.joined, 0)
    fit(plain, inners if same else build(RULES["adagrad"], plain), batches.joined, 3)

    def body(context):
        model, other = Model(), linear()
        rank = context.trainer_rank
        inners = build(RULES["adagrad"], model)
        old, apart = wrapped(model, inners), wrapped(other)
        fit(model, [old], lambda step: batches.part(step, rank), 0)
        new = wrapped(model, inners if same else build(RULES["adagrad"], model))
        with pytest.raises(cpudist.ClosedError, match="took over"):
            old.step()
        assert cpudist.current().optimizers() == [apart, new]
        fit(model, [new], lambda step: batches.part(step, rank), 3)
        step_on(other, apart)
        new.flush()
        return copy_of(model)

    for state in run(body, 2, 2):
        assert largest_difference(state, copy_of(plain)) <= 5e-6


def test_wrapping_again_waits_for_the_steps_of_those_still_training():
    def body(context):
        model = linear()
        old = wrapped(model)
        for step in range(20 if context.trainer_rank else 1):
            step_on(model, old, value=0.1 * step)
        if context.trainer_rank == 0:
            old.leave()
        last = copy_of(model)
        wrapped(model)
        return last, copy_of(model)

    (_, first), (trained, second) = run(body, 2)
    assert_same_bits(trained, first)
    assert_same_bits(trained, second)


def test_weights_loaded_before_wrapping_again_are_kept():
    def body():
        model = Model()
        wrapped(model)
        with torch.no_grad():
            model.bag.weight.fill_(0.5)
            model.first.bias.fill_(0.25)
        expected = copy_of(model)
        optimizer = wrapped(model)
        optimizer.flush()
        assert_same_bits(expected, copy_of(model))

    alone(body)


def test_two_optimizers_of_one_model_go_on_side_by_side():
    """A discriminator and a generator, say: their rounds are their own."""

    def body(context):
        first, second = linear(), linear()
        one, two = wrapped(first), wrapped(second, sgd(second, lr=0.01))
        for step in range(4):
            step_on(first, one)
            if step % 2:
                step_on(second, two)
        assert (one.rounds, two.rounds) == (4, 2)
        return copy_of(first), copy_of(second)

    results = run(body, 2)
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


def test_a_model_without_anything_to_train():
    def body():
        model = linear().requires_grad_(False)
        optimizer = wrapped(model)
        before = copy_of(model)
        optimizer.step()
        optimizer.flush()
        assert_same_bits(before, copy_of(model))

    alone(body)
