# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Replicas of models whose parameters lie in memory in other ways, or are complex."""

from __future__ import annotations

import copy

import pytest
import torch
from replica_cases import DIM
from replica_tables import MODES, assert_equal, both
from torch import nn

SGD, Adagrad, Adam = torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Conv2d(3, 6, 3, dtype=torch.float64)
        self.second = nn.Conv2d(6, 2, 3, dtype=torch.float64)

    def forward(self, x):
        return self.second(self.first(x).relu()).mean((1, 2, 3))


def images(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, 8, 8, generator=generator, dtype=torch.float64)


OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adam": lambda p: Adam(p, lr=0.05),
    "adam-tensor-betas": lambda p: Adam(
        p, lr=0.05, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=None
    ),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.05)),
}


@MODES
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_models_may_change_their_layout(rule, reduce):
    """torch's fused kernels go over memory and look at no strides."""

    def between(step, model, optimizers):
        if step == 1:
            model.to(memory_format=torch.channels_last)
        if step == 3:  # as from a file that knows no layout
            state = copy.deepcopy(optimizers[0].state_dict())
            for kept in state["state"].values():
                for name, value in kept.items():
                    kept[name] = torch.as_tensor(value).contiguous()
            optimizers[0].load_state_dict(state)

    batches = [(images(i).tensor_split(2), images(i)) for i in range(6)]
    models = both(
        Convolution,
        lambda model: [OPTIMIZERS[rule](model.parameters())],
        lambda model, x: model(x).square().mean(),
        batches,
        reduce,
        between=between,
    )
    assert_equal(models)


class Holes(nn.Module):
    """Every other column of something larger."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.whole = torch.randn(3, 8, dtype=torch.float64)
        self.weight = nn.Parameter(self.whole[:, ::2])

    def forward(self, x):
        return x @ self.weight


@MODES
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_what_lies_between_elements_stays(rule, reduce):
    x = torch.randn(4, 3, dtype=torch.float64)
    models = both(
        Holes,
        lambda model: [OPTIMIZERS[rule](model.parameters())],
        lambda model, x: model(x).square().mean(),
        [(x.tensor_split(2), x)] * 4,
        reduce,
    )
    assert_equal(models)
    assert torch.equal(models[0].whole[:, 1::2], Holes().whole[:, 1::2])


@MODES
def test_counts_of_steps_of_another_dtype(reduce):
    """As in files that others wrote."""

    def make():
        torch.manual_seed(8)
        return nn.Linear(DIM, 2, dtype=torch.float64)

    def between(step, model, optimizers):
        for state in optimizers[0].state.values():
            state["step"] = state["step"].double()

    x = torch.randn(6, DIM, dtype=torch.float64)
    models = both(
        make,
        lambda model: [Adam(model.parameters(), lr=0.1)],
        lambda model, x: model(x).square().mean(),
        [(x.tensor_split(2), x)] * 4,
        reduce,
        between=between,
    )
    assert_equal(models)


@MODES
def test_complex_parameters(reduce):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(6)
            self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))

        def forward(self, x):
            return (x * self.weight).abs().square().mean()

    x = torch.randn(4, 3, dtype=torch.float64)
    models = both(
        Complex,
        lambda model: [Adam(model.parameters(), lr=0.1)],
        lambda model, x: model(x),
        [(x.tensor_split(2), x)] * 3,
        reduce,
    )
    found, expected = (model.weight.detach() for model in models)
    assert torch.allclose(found, expected, rtol=1e-12)
