# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What replicas compute: the numbers of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch
from replica_cases import DIM, allowed, batch_of, by_replicas, loss_of
from sync_cases import RULES, Model, assert_same_bits, copy_of, largest_difference
from sync_cases import build as build_rule
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.replicas import reduction, splitting

EVEN = lambda step: 12  # noqa: E731
UNEVEN = lambda step: 7 + step % 5  # noqa: E731
WITH_TABLE = ("sgd", "adagrad", "sparse_adam", "ftrl", "row_wise_adagrad")


def builder(name):
    return lambda model: build_rule(RULES[name], model)


@pytest.mark.parametrize("reduce", ["reduce", "allreduce"])
@pytest.mark.parametrize("name", RULES)
def test_equal_to_one_process_in_float64(name, reduce):
    expected, difference = allowed(builder(name), UNEVEN, torch.float64, False)
    found = by_replicas(
        builder(name), UNEVEN, torch.float64, False, replicas=3, reduce=reduce
    )
    assert largest_difference(found, expected) <= difference


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("name", WITH_TABLE)
def test_equal_to_one_process_in_float32(name, table):
    expected, difference = allowed(builder(name), UNEVEN, torch.float32, table)
    by_mode = {
        reduce: by_replicas(builder(name), UNEVEN, torch.float32, table, reduce=reduce)
        for reduce in ("reduce", "allreduce")
    }
    for found in by_mode.values():
        assert largest_difference(found, expected) <= difference
    # Rows of a table that are dealt to owners are the same rows.
    assert_same_bits(by_mode["reduce"], by_mode["allreduce"])


def test_two_runs_have_the_same_bits():
    def train():
        return by_replicas(
            builder("adagrad"), UNEVEN, torch.float32, True, 3, deterministic=True
        )

    assert_same_bits(train(), train())


def test_equal_weights_are_those_of_fluid():
    model, plain = Model(torch.float64, False), Model(torch.float64, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batch_of(0, 7, torch.float64)
    with cpudist.ReplicaExecutor(
        model, loss_of, optimizer, 2, gradient_scale="equal"
    ) as executor:
        executor.run(batch)
    for part in (slice(0, 3), slice(3, 7)):
        (loss_of(plain, [tensor[part] for tensor in batch]) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert largest_difference(copy_of(model), copy_of(plain)) < 1e-12


@pytest.mark.parametrize("scale", ["sum", "custom"])
def test_other_gradient_scales(scale):
    batch = batch_of(0, 8, torch.float64)
    model, plain = Model(torch.float64, False), Model(torch.float64, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = torch.linspace(0, 1, 8, dtype=torch.float64)

    def losses(net, part):
        each = (net(*part[:2]) - part[2]).square()
        return each.sum() if scale == "sum" else each

    with cpudist.ReplicaExecutor(
        model, losses, optimizer, 3, gradient_scale=scale
    ) as executor:
        gradient = weights if scale == "custom" else None
        executor.run(batch, loss_gradient=gradient)
    whole = losses(plain, batch)
    whole.backward(weights if scale == "custom" else None)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.grad, other.grad, atol=1e-12)


def test_numbers_and_lists_are_loss_gradients_too():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ones = torch.ones(4, 2)
    with cpudist.ReplicaExecutor(
        model, lambda net, x: net(x).mean(), optimizer, 2, gradient_scale="custom"
    ) as executor:
        executor.run(ones, loss_gradient=3.0)
        assert model.weight.grad.tolist() == [[6.0, 6.0]]
        executor.run(ones, loss_gradient=[1.0, torch.tensor(4.0)])
        assert model.weight.grad.tolist() == [[5.0, 5.0]]
        with pytest.raises(cpudist.InvalidArgumentError, match="3 entries for 2"):
            executor.run(ones, loss_gradient=[1.0, 2.0, 3.0])
        with pytest.raises(cpudist.InvalidArgumentError, match="belong together"):
            executor.run(ones)


def test_gradients_accumulate_until_a_step():
    model, plain = Model(torch.float64, False), Model(torch.float64, False)
    optimizer = torch.optim.Adam(model.parameters())
    reference = torch.optim.Adam(plain.parameters())
    with cpudist.ReplicaExecutor(model, loss_of, optimizer, 2) as executor:
        for step in range(4):
            batch = batch_of(step, 6, torch.float64)
            executor.run(batch, step=step % 2 == 1)
            loss_of(plain, batch).backward()
            if step % 2 == 1:
                reference.step()
                reference.zero_grad()
    assert largest_difference(copy_of(model), copy_of(plain)) < 1e-9


def test_gradients_can_be_clipped_before_the_update():
    model, plain = Model(torch.float64, False), Model(torch.float64, False)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    reference = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    clip = torch.nn.utils.clip_grad_norm_
    with cpudist.ReplicaExecutor(
        model,
        loss_of,
        optimizer,
        2,
        before_update=lambda: clip(model.parameters(), 0.01),
    ) as executor:
        for step in range(5):
            batch = batch_of(step, 6, torch.float64)
            executor.run(batch)
            reference.zero_grad()
            loss_of(plain, batch).backward()
            clip(plain.parameters(), 0.01)
            reference.step()
    assert largest_difference(copy_of(model), copy_of(plain)) < 1e-9


@pytest.mark.parametrize("reduce", ["reduce", "allreduce"])
def test_schedules_and_loaded_state_are_followed(reduce):
    model, plain = Model(torch.float64, False), Model(torch.float64, False)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    with cpudist.ReplicaExecutor(
        model, loss_of, optimizers[0], 3, reduce=reduce
    ) as executor:
        for step in range(8):
            batch = batch_of(step, 6, torch.float64)
            executor.run(batch)
            optimizers[1].zero_grad()
            loss_of(plain, batch).backward()
            optimizers[1].step()
            for schedule in schedules:
                schedule.step()
            if step == 3:  # another run's model and state
                model.load_state_dict(Model(torch.float64, False).state_dict())
                plain.load_state_dict(Model(torch.float64, False).state_dict())
                fresh = torch.optim.Adam(Model(torch.float64).parameters(), lr=0.1)
                for optimizer in optimizers:
                    loaded = optimizer.state_dict()
                    loaded["state"] = fresh.state_dict()["state"]
                    optimizer.load_state_dict(loaded)
    assert largest_difference(copy_of(model), copy_of(plain)) < 1e-9


def clear(optimizer):
    optimizer.state.clear()


def replace(optimizer):
    optimizer.state = type(optimizer.state)(dict)


def edit(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def put(optimizer):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.ones_like(state["exp_avg"])


def step(optimizer):
    optimizer.step()


@pytest.mark.parametrize("reduce", ["reduce", "allreduce"])
@pytest.mark.parametrize("change", [clear, replace, edit, put, step])
def test_state_that_the_user_writes_is_every_replicas(change, reduce):
    model, plain = Model(torch.float64, False), Model(torch.float64, False)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, plain)]
    with cpudist.ReplicaExecutor(
        model, loss_of, optimizers[0], 2, reduce=reduce
    ) as executor:
        for number in range(6):
            batch = batch_of(number, 6, torch.float64)
            executor.run(batch)
            optimizers[1].zero_grad()
            loss_of(plain, batch).backward()
            optimizers[1].step()
            if number % 2:
                for optimizer in optimizers:
                    change(optimizer)
    assert largest_difference(copy_of(model), copy_of(plain)) < 1e-9


def test_copies_are_taken_anew_after_a_step_that_failed():
    class Fails(torch.optim.SGD):
        failing = False

        def step(self, closure=None):
            if Fails.failing and self is optimizer:
                raise KeyError("of the first replica")
            return super().step(closure)

    model = nn.Linear(DIM, 1)
    optimizer = Fails(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(4, DIM)
    with cpudist.ReplicaExecutor(
        model, lambda net, part: net(part).mean(), optimizer, 2, "allreduce"
    ) as executor:
        executor.run(x)
        Fails.failing = True
        with pytest.raises(KeyError):
            executor.run(x)
        Fails.failing = False
        for _ in range(2):
            assert torch.allclose(executor.predict(x), model(x), atol=1e-5)
            executor.run(x)


def test_an_optimizer_that_looks_at_all_parameters_steps_as_a_whole():
    class Normed(torch.optim.SGD):
        def step(self, closure=None):
            params = self.param_groups[0]["params"]
            norm = torch.cat([p.grad.flatten() for p in params]).norm()
            for p in params:
                p.grad.div_(norm)
            return super().step(closure)

    expected, difference = allowed(
        lambda m: [Normed(m.parameters(), lr=0.1)], EVEN, torch.float64, False
    )
    found = by_replicas(
        lambda m: [Normed(m.parameters(), lr=0.1)], EVEN, torch.float64, False, 3
    )
    assert largest_difference(found, expected) <= difference


def test_step_hooks_run_once_per_step():
    model = nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    x = torch.ones(4, DIM)
    with cpudist.ReplicaExecutor(
        model, lambda net, part: net(part).mean(), optimizer, 2
    ) as executor:
        executor.run(x)
        hook = optimizer.register_step_post_hook(
            lambda *_: seen.append(model.weight.grad.clone())
        )
        before = copy_of(model)
        executor.run(x)
        assert largest_difference(copy_of(model), before) > 0
        hook.remove()
        executor.run(x)
    assert len(seen) == 1
    assert torch.allclose(seen[0], torch.ones(1, DIM))


def test_unused_and_frozen_parameters_stay():
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)
            self.frozen = nn.Linear(2, 1)
            self.sometimes = nn.Linear(2, 1)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            out = self.used(x) + self.frozen(x)
            return out + self.sometimes(x) if x[0, 0] > 0 else out

    model = Some()
    before = copy_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.tensor([[-1.0, 1.0], [1.0, 2.0]])
    with cpudist.ReplicaExecutor(
        model, lambda net, x: net(x).mean(), optimizer, 2
    ) as executor:
        executor.run(x)
    for name, value in model.state_dict().items():
        same = name.startswith(("unused", "frozen"))
        assert torch.equal(value, before[name]) == same, name
    assert model.sometimes.weight.grad.tolist() == [[0.5, 1.0]]


def test_results_are_of_replicas_and_can_be_joined():
    model = nn.Linear(DIM, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_fn(net, x):
        out = net(x)
        return {"loss": out.mean(), "out": (out, x.sum(1)), "name": "one"}

    x = torch.randn(7, DIM)
    with cpudist.ReplicaExecutor(model, loss_fn, optimizer, 3) as executor:
        results = executor.run(x)
        assert [len(r["out"][0]) for r in results] == [2, 2, 3]
        assert not any(r["out"][0].requires_grad for r in results)
        joined = executor.join(results)
        assert torch.allclose(joined["out"][0], model(x))
        assert torch.equal(joined["out"][1], x.sum(1))
        assert joined["loss"].shape == (3,)
        assert joined["name"] == "one"
        evaluated = executor.join(executor.evaluate(x))
        assert torch.equal(evaluated["out"][0], joined["out"][0])


def test_predictions_share_the_parameters():
    model = nn.Sequential(nn.Linear(DIM, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(5, DIM)
    with cpudist.ReplicaExecutor(
        model, lambda net, x: net(x).square().mean(), optimizer, 2
    ) as executor:
        for _ in range(3):
            executor.run(x)
            with torch.no_grad():
                expected = model[0](x)
            assert torch.allclose(executor.predict(x), expected, atol=1e-6)
        assert model.training
        assert not executor.predict(x).requires_grad
        with torch.inference_mode():
            assert executor.predict((x,)).is_inference()
        assert torch.allclose(executor.predict(x[:1]), expected[:1], atol=1e-6)
        assert executor.predict({"input": x[:0]}).shape == (0, 3)
        twice = executor.predict(x, lambda net, part: 2 * net(part))
        assert torch.allclose(twice, 2 * expected, atol=1e-6)


def test_batches_are_cut_whatever_holds_them():
    x = torch.arange(7)
    batch = {"a": [x, (x[:, None], 3)], "b": x.numpy(), "c": torch.tensor(5), "d": "t"}
    parts = splitting.split(batch, 3)
    assert [part["a"][0].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5, 6]]
    assert parts[2]["a"][1][0].shape == (3, 1)
    assert parts[0]["a"][0].data_ptr() == x.data_ptr()
    assert parts[1]["b"].tolist() == [2, 3]
    assert {(part["a"][1][1], int(part["c"]), part["d"]) for part in parts} == {
        (3, 5, "t")
    }
    assert torch.equal(splitting.join(parts)["a"][0], x)


def test_batches_that_cannot_be_cut():
    with pytest.raises(cpudist.BatchTooSmallError, match="CPU_NUM=2"):
        splitting.split(torch.zeros(2), 3)
    with pytest.raises(cpudist.InvalidArgumentError, match=r"\[3, 4\] samples"):
        splitting.split((torch.zeros(3), torch.zeros(4)), 2)
    with pytest.raises(cpudist.InvalidArgumentError, match="found object"):
        splitting.split((torch.zeros(3), object()), 2)


def test_owners_have_equal_shares():
    sizes = [100, 1, 60, 50, 40, 2]
    parameters = [torch.empty(size) for size in sizes]
    owned = reduction.deal_owners(parameters, set(), 2)
    assert owned == [[0, 4], [1, 2, 3, 5]]
    # A table weighs nothing among the others.
    owned = reduction.deal_owners(parameters, {id(parameters[0])}, 2)
    assert owned == [[0, 1, 2, 5], [3, 4]]
