# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""RowWiseAdagrad and FTRL: their formulas, on dense and on sparse gradients."""

from __future__ import annotations

import math

import pytest
import torch

from torch_cpudist.optim import FTRL, RowWiseAdagrad

STEPS = 5
FTRL_OPTIONS = {"lr": 0.3, "l1": 0.05, "l2": 0.1, "beta": 0.5}
ADAGRAD_OPTIONS = {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.5}


def gradients(shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(STEPS)]


def train(optimizer, parameter, grads):
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach().clone()


def row_wise_adagrad(
    weight, grads, lr, lr_decay=0.0, weight_decay=0.0, start=0.0, eps=1e-10
):
    """The formula, row by row, in plain Python."""
    rows = [[float(x) for x in row] for row in weight]
    sums = [start] * len(rows)
    for step, grad in enumerate(grads):
        for r, row in enumerate(rows):
            g = [float(x) + weight_decay * w for x, w in zip(grad[r], row, strict=True)]
            sums[r] += sum(x * x for x in g) / len(g)
            rate = lr / (1 + step * lr_decay) / (math.sqrt(sums[r]) + eps)
            rows[r] = [w - rate * x for w, x in zip(row, g, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)


def ftrl(weight, grads, lr, l1, l2, beta, power=0.5, start=0.0):
    """The formula, element by element, in plain Python."""
    flat = [float(x) for x in weight.flatten()]
    z, n = [0.0] * len(flat), [start] * len(flat)
    for grad in grads:
        for i, g in enumerate(grad.flatten().tolist()):
            sigma = ((n[i] + g * g) ** power - n[i] ** power) / lr
            z[i] += g - sigma * flat[i]
            n[i] += g * g
            rate = (beta + n[i] ** power) / lr + l2
            shrunk = math.copysign(l1, z[i]) - z[i]
            if n[i] > 0:
                flat[i] = 0.0 if abs(z[i]) <= l1 else shrunk / rate
    return torch.tensor(flat, dtype=torch.float64).reshape(weight.shape)


def parameter_of(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(9)
    return torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_row_wise_adagrad_formula(weight_decay):
    parameter = parameter_of((4, 3))
    grads = gradients((4, 3))
    expected = row_wise_adagrad(
        parameter.detach(), grads, 0.1, 0.2, weight_decay, start=0.5
    )
    optimizer = RowWiseAdagrad(
        [parameter], **ADAGRAD_OPTIONS, weight_decay=weight_decay
    )
    found = train(optimizer, parameter, grads)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert optimizer.state[parameter]["sum"].shape == (4,)


def test_row_wise_adagrad_of_a_vector_is_adagrad():
    ours, theirs = parameter_of((6,)), parameter_of((6,))
    grads = gradients((6,))
    found = train(RowWiseAdagrad([ours], **ADAGRAD_OPTIONS), ours, grads)
    expected = train(torch.optim.Adagrad([theirs], **ADAGRAD_OPTIONS), theirs, grads)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (2, 3, 4)])
def test_row_wise_adagrad_of_other_shapes(shape):
    parameter = parameter_of(shape)
    grads = gradients(shape)
    rows = shape[0] if shape else 1
    expected = row_wise_adagrad(
        parameter.detach().reshape(rows, -1), [g.reshape(rows, -1) for g in grads], 0.1
    )
    found = train(RowWiseAdagrad([parameter], lr=0.1), parameter, grads)
    torch.testing.assert_close(
        found.reshape(rows, -1), expected, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("start", [0.0, 0.4])
@pytest.mark.parametrize("power", [0.5, 0.7])
def test_ftrl_formula(start, power):
    parameter = parameter_of((4, 3))
    grads = gradients((4, 3))
    expected = ftrl(
        parameter.detach(), grads, 0.3, 0.05, 0.1, 0.5, power=power, start=start
    )
    optimizer = FTRL(
        [parameter],
        **FTRL_OPTIONS,
        lr_power=-power,
        initial_accumulator_value=start,
    )
    found = train(optimizer, parameter, grads)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_ftrl_makes_weights_zero_and_keeps_unseen_ones():
    parameter = torch.nn.Parameter(torch.ones(3))
    grad = torch.tensor([1.0, 1e-3, 0.0])
    found = train(FTRL([parameter], lr=1.0, l1=5.0), parameter, [grad] * 3)
    assert found.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "options"), [(RowWiseAdagrad, ADAGRAD_OPTIONS), (FTRL, FTRL_OPTIONS)]
)
def test_sparse_gradient_updates_its_rows_as_a_dense_one(kind, options):
    """Duplicates are summed; rows without a gradient keep weight and state."""
    keys = torch.tensor([5, 1, 5, 2])
    values = gradients((4, 3))
    sparse = parameter_of((7, 3))
    dense = torch.nn.Parameter(sparse.detach()[[1, 2, 5]].clone())
    before = sparse.detach().clone()
    found = train(
        kind([sparse], **options),
        sparse,
        [torch.sparse_coo_tensor(keys[None], v, (7, 3)) for v in values],
    )
    expected = train(
        kind([dense], **options),
        dense,
        [torch.stack([v[1], v[3], v[0] + v[2]]) for v in values],
    )
    torch.testing.assert_close(found[[1, 2, 5]], expected, rtol=1e-12, atol=1e-12)
    untouched = [0, 3, 4, 6]
    assert torch.equal(found[untouched], before[untouched])


@pytest.mark.parametrize("kind", [RowWiseAdagrad, FTRL])
def test_empty_and_missing_gradients(kind):
    rows = torch.nn.Parameter(torch.ones(3, 2))
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([rows, unused])
    empty = torch.empty(1, 0, dtype=torch.int64)
    rows.grad = torch.sparse_coo_tensor(empty, torch.empty(0, 2), (3, 2))
    optimizer.step()
    assert torch.equal(rows, torch.ones(3, 2))
    assert unused not in optimizer.state


@pytest.mark.parametrize("kind", [RowWiseAdagrad, FTRL])
def test_state_dict_continues(kind):
    grads = gradients((4, 3))
    whole = parameter_of((4, 3))
    expected = train(kind([whole]), whole, grads)
    parameter = parameter_of((4, 3))
    first = kind([parameter])
    train(first, parameter, grads[:2])
    second = kind([parameter])
    second.load_state_dict(first.state_dict())
    assert torch.equal(train(second, parameter, grads[2:]), expected)


@pytest.mark.parametrize("kind", [RowWiseAdagrad, FTRL])
def test_closure_and_scheduler(kind):
    parameter = parameter_of((2, 2))
    optimizer = kind([parameter], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.step(closure) < first


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (RowWiseAdagrad, "lr", -1.0),
        (RowWiseAdagrad, "lr_decay", -1.0),
        (RowWiseAdagrad, "weight_decay", -1.0),
        (RowWiseAdagrad, "initial_accumulator_value", -1.0),
        (RowWiseAdagrad, "eps", -1.0),
        (FTRL, "lr", 0.0),
        (FTRL, "lr_power", 0.5),
        (FTRL, "l1", -1.0),
        (FTRL, "l2", math.nan),
        (FTRL, "beta", -1.0),
        (FTRL, "initial_accumulator_value", -1.0),
    ],
)
def test_options_out_of_range(kind, option, value):
    with pytest.raises(ValueError, match=f"{kind.__name__}: {option} must be"):
        kind([torch.nn.Parameter(torch.ones(1))], **{option: value})
