# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which torch optimizers the servers run, with which options, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import optim

import torch_cpudist as cpudist
from torch_cpudist.optim import FTRL, RowWiseAdagrad
from torch_cpudist.rules.read import check_optimizer, check_use, read_group


def parameters():
    return [torch.nn.Parameter(torch.ones(2))]


def read(optimizer):
    check_optimizer(optimizer)
    return read_group(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (
            optim.SGD,
            {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
            {"kind": "sgd", "dampening": 0.0},
        ),
        (
            optim.SGD,
            {"lr": 0.5, "momentum": 0.9, "dampening": 0.25},
            {"kind": "sgd", "nesterov": False},
        ),
        (
            optim.Adagrad,
            {"lr": 0.5, "lr_decay": 0.25, "weight_decay": 0.125, "eps": 0.5},
            {"kind": "adagrad"},
        ),
        (
            optim.Adagrad,
            {"initial_accumulator_value": 0.5},
            {"kind": "adagrad", "initial_accumulator": 0.5},
        ),
        (
            RowWiseAdagrad,
            {"lr": 0.5, "lr_decay": 0.25, "initial_accumulator_value": 2.0},
            {"kind": "row_wise_adagrad", "initial_accumulator": 2.0},
        ),
        (
            optim.Adam,
            {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25},
            {"kind": "adam", "beta1": 0.5, "beta2": 0.75},
        ),
        (optim.Adam, {"decoupled_weight_decay": True}, {"kind": "adamw"}),
        (optim.AdamW, {"weight_decay": 0.25}, {"kind": "adamw"}),
        (
            optim.SparseAdam,
            {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.25},
            {"kind": "sparse_adam", "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.0},
        ),
        (
            optim.RMSprop,
            {"alpha": 0.5, "eps": 0.25, "weight_decay": 0.125, "momentum": 0.75},
            {"kind": "rmsprop"},
        ),
        (
            FTRL,
            {"lr": 0.5, "l1": 0.25, "l2": 0.125, "lr_power": -0.75},
            {"kind": "ftrl"},
        ),
        (
            FTRL,
            {"beta": 0.25, "initial_accumulator_value": 0.5},
            {"eps": 0.25, "initial_accumulator": 0.5},
        ),
    ],
)
def test_class_and_options_choose_the_rule(kind, options, expected):
    config = read(kind(parameters(), **options))
    renamed = {"betas", "beta", "initial_accumulator_value", "decoupled_weight_decay"}
    direct = {name: value for name, value in options.items() if name not in renamed}
    for name, value in (direct | expected).items():
        assert getattr(config, name) == value, name


def test_options_are_read_as_they_stand_now():
    optimizer = optim.Adam(parameters(), lr=0.5)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert read(optimizer).lr == 0.25


def test_a_tensor_learning_rate_is_read():
    assert read(optim.Adam(parameters(), lr=torch.tensor(0.25))).lr == 0.25


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_options_of_the_implementation_change_nothing(option):
    plain = read(optim.Adam(parameters()))
    group = optim.Adam(parameters())
    group.param_groups[0][option] = True
    assert read(group) == plain


def test_what_torch_ignores_is_ignored():
    """Names of parameters, tags, and what schedulers leave in the groups."""
    model = torch.nn.Linear(2, 2)
    optimizer = optim.SGD(model.named_parameters(), lr=0.5, momentum=0.9)
    optimizer.param_groups[0]["tag"] = "body"
    optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    optim.swa_utils.SWALR(optimizer, swa_lr=0.1)
    assert read(optimizer).kind == "sgd"


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (optim.SGD, "maximize"),
        (optim.SGD, "differentiable"),
        (optim.Adagrad, "maximize"),
        (optim.Adam, "amsgrad"),
        (optim.Adam, "maximize"),
        (optim.AdamW, "amsgrad"),
        (optim.SparseAdam, "maximize"),
        (optim.RMSprop, "centered"),
        (optim.RMSprop, "maximize"),
    ],
)
def test_options_without_a_rule_are_refused_by_name(kind, option):
    optimizer = kind(parameters(), **{option: True})
    expected = f"{kind.__name__}: .*{option}=True"
    with pytest.raises(cpudist.UnsupportedOptimizerError, match=expected):
        read(optimizer)


def test_an_option_that_a_later_torch_adds_is_refused_when_set():
    optimizer = optim.SGD(parameters(), lr=0.5)
    optimizer.defaults["lookahead"] = 0
    assert read(optimizer).kind == "sgd"
    optimizer.param_groups[0]["lookahead"] = 3
    with pytest.raises(cpudist.UnsupportedOptimizerError, match="lookahead=3"):
        read(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.LBFGS(p),
        lambda p: optim.Adamax(p),
        lambda p: type("MySGD", (optim.SGD,), {})(p, lr=0.1),
    ],
)
def test_other_classes_are_refused_with_those_that_work(make):
    optimizer = make(parameters())
    name = type(optimizer).__name__
    with pytest.raises(cpudist.UnsupportedOptimizerError, match=name) as caught:
        check_optimizer(optimizer)
    for known in ("SGD", "Adagrad", "RowWiseAdagrad", "AdamW", "SparseAdam", "FTRL"):
        assert known in str(caught.value)


def test_values_out_of_range_are_refused():
    optimizer = optim.SGD(parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(cpudist.InvalidArgumentError, match=r"sgd.*not finite"):
        read(optimizer)


def test_sparse_adam_is_for_tables_only():
    optimizer = optim.SparseAdam(parameters())
    config = read(optimizer)
    check_use(optimizer, config, "emb.weight", table=True)
    with pytest.raises(cpudist.UnsupportedOptimizerError, match=r"fc\.bias"):
        check_use(optimizer, config, "fc.bias", table=False)
