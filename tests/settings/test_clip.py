# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Clipping a trainer's own gradient, sparse ones included; settings of clip=."""

from __future__ import annotations

import math

import pytest
import torch

import torch_cpudist as cpudist
from torch_cpudist.model.clipping import clip_own


def with_grads(*grads):
    parameters = []
    for grad in grads:
        parameter = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
        parameter.grad = grad
        parameters.append(parameter)
    return parameters


def sparse(keys, values, rows=9):
    return torch.sparse_coo_tensor(
        torch.tensor([keys]), values, (rows, *values.shape[1:])
    )


def sample(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e6])
@pytest.mark.parametrize("coalesced", [True, False])
def test_equals_torch_on_the_dense_form(max_norm, coalesced):
    """torch refuses sparse gradients, so it gets the same gradient as a strided one."""
    grad = sparse([4, 0, 4, 7], sample(4, 3, seed=1))
    grad = grad.coalesce() if coalesced else grad
    other = sample(5)
    expected = with_grads(grad.to_dense(), other.clone())
    found = with_grads(grad.clone(), other.clone())
    norm = cpudist.clip_grad_norm_(found, max_norm)
    expected_norm = torch.nn.utils.clip_grad_norm_(expected, max_norm)
    torch.testing.assert_close(norm.float(), expected_norm)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.grad.is_sparse == (ours is found[0])
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)


def test_duplicates_are_summed_before_the_norm():
    rows = torch.tensor([[3.0], [-3.0], [4.0]])
    parameters = with_grads(sparse([1, 1, 2], rows))
    assert cpudist.clip_grad_norm_(parameters, 2.0).item() == pytest.approx(4.0)
    clipped = parameters[0].grad.to_dense()
    torch.testing.assert_close(clipped[2], torch.tensor([2.0]))


def test_gradients_with_more_dimensions_than_a_table():
    grad = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), sample(2), (2, 2))
    norm = cpudist.clip_grad_norm_(with_grads(grad), 10.0)
    assert norm.item() == pytest.approx(abs(sample(2).sum().item()), rel=1e-6)


def summed(*addends):
    """The parameters of modules whose outputs are added, with gradients."""
    ids = torch.tensor([[0, 0, 3], [5, 1, 1]])
    sum(addend(ids) for addend in addends).mul(sample(2, 3, 2)).sum().backward()
    return [parameter for addend in addends for parameter in addend.parameters()]


class Bias(torch.nn.Module):
    """A dense parameter of the shape of the looked-up rows."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(2, 3, 2))

    def forward(self, ids):
        return self.bias


def embedding():
    return torch.nn.Embedding(9, 2, sparse=True)


def buffer_of(grad):
    values = grad._values() if grad.is_sparse else grad
    return values.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "addends", [(embedding, embedding), (embedding, Bias), (Bias, embedding)]
)
def test_gradients_that_share_their_values_are_scaled_once(addends):
    parameters = summed(*(make() for make in addends))
    if Bias in addends:
        # A strided gradient over the same buffer, as a user's own code may set it.
        bias, table = sorted(parameters, key=lambda p: p.grad.is_sparse)
        bias.grad = table.grad._values().view(2, 3, 2)
    assert buffer_of(parameters[0].grad) == buffer_of(parameters[1].grad)
    expected = with_grads(*(p.grad.to_dense().clone() for p in parameters))
    torch.nn.utils.clip_grad_norm_(expected, 0.5)
    cpudist.clip_grad_norm_(parameters, 0.5)
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad)
    assert cpudist.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(0.5)


def test_arguments_stand_where_torch_has_them():
    parameters = with_grads(torch.tensor([3.0, 4.0]))
    assert cpudist.clip_grad_norm_(parameters, 1.0, 2.0).item() == 5.0
    torch.testing.assert_close(parameters[0].grad, torch.tensor([0.6, 0.8]))
    with pytest.raises(TypeError, match="positional"):
        cpudist.clip_grad_norm_(parameters, 1.0, 2.0, True)


@pytest.mark.parametrize("norm_type", [1.0, math.inf, True, math.nan])
def test_other_norms_are_refused(norm_type):
    parameters = with_grads(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match="norm_type must be 2"):
        cpudist.clip_grad_norm_(parameters, 1.0, norm_type)
    assert parameters[0].grad.tolist() == [3.0, 4.0]


def test_missing_gradients_and_a_single_tensor():
    unused = torch.nn.Parameter(torch.ones(2))
    assert cpudist.clip_grad_norm_([unused], 1.0).item() == 0.0
    assert cpudist.clip_grad_norm_([], 1.0).item() == 0.0
    parameter = with_grads(torch.full((4,), 2.0))[0]
    assert cpudist.clip_grad_norm_(parameter, 1.0).item() == 4.0
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))


def test_a_generator_of_parameters_is_read_once():
    parameters = with_grads(torch.ones(4))
    norm = cpudist.clip_grad_norm_((p for p in parameters), 1.0)
    assert norm.item() == 2.0
    torch.testing.assert_close(parameters[0].grad, torch.full((4,), 0.5))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_treated_as_in_torch(value):
    grads = [torch.tensor([1.0, value]), torch.ones(2)]
    ours = with_grads(*(g.clone() for g in grads))
    theirs = with_grads(*(g.clone() for g in grads))
    cpudist.clip_grad_norm_(ours, 1.0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


def test_a_norm_that_is_not_finite_can_be_an_error():
    parameters = with_grads(torch.tensor([1.0, math.inf]))
    with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
        cpudist.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert parameters[0].grad.tolist() == [1.0, math.inf]


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_limits_out_of_range(value):
    with pytest.raises(ValueError, match="max_norm must be >= 0"):
        cpudist.clip_grad_norm_([], value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", [cpudist.ClipNorm, cpudist.ClipValue])
def test_settings_out_of_range(kind, value):
    with pytest.raises(ValueError, match=f"{kind.__name__}: .* finite and > 0"):
        kind(value)


@pytest.mark.parametrize("max_norm", [0.3, 2.0, 1e6])
def test_each_tensor_by_its_own_norm_equals_torch_on_each(max_norm):
    grads = [
        sparse([4, 0, 4, 7], sample(4, 3, seed=1).double()),
        sample(5).double(),
        sample(2, 4, seed=3).double() * 9,
        torch.zeros(3, dtype=torch.float64),
    ]
    expected = with_grads(*(grad.to_dense().clone() for grad in grads))
    found = with_grads(*(grad.clone() for grad in grads))
    found.append(torch.nn.Parameter(torch.zeros(2)))  # without a gradient
    for parameter in expected:
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    clip_own(cpudist.ClipTensorNorm(max_norm), found)
    for ours, theirs in zip(found[:-1], expected, strict=True):
        torch.testing.assert_close(
            ours.grad.to_dense(), theirs.grad, rtol=1e-12, atol=1e-15
        )
    assert found[-1].grad is None


def test_sparse_gradients_of_one_buffer_are_clipped_apart():
    values = sample(3, 2, seed=4)
    first, second = sparse([0, 1, 2], values), sparse([3, 3, 3], values)
    found = with_grads(first, second)
    expected = [grad.to_dense() for grad in (first, second)]
    for grad in expected:
        grad.mul_(min(1.0, 0.5 / (float(grad.norm()) + 1e-6)))
    clip_own(cpudist.ClipTensorNorm(0.5), found)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), theirs)


@pytest.mark.parametrize(
    "strategy",
    [
        cpudist.Sync(),
        cpudist.HalfAsync(),
        cpudist.Hybrid(dense="sync"),
        cpudist.Hybrid(sparse="sync"),
        cpudist.Hybrid(sparse="geo"),
    ],
    ids=str,
)
def test_every_strategy_takes_norms_of_tensors(strategy):
    strategy.check_clip(cpudist.ClipTensorNorm(1.0))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, "1"])
def test_a_norm_of_tensors_is_positive(wrong):
    with pytest.raises(cpudist.InvalidArgumentError, match="ClipTensorNorm: max_norm"):
        cpudist.ClipTensorNorm(wrong)
