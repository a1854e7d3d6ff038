# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer state that does not fit: refused before anything is changed or sent."""

from __future__ import annotations

import copy

import pytest
import torch
from optimizer_cases import alone, linear, wrapped
from sync_cases import assert_same_bits, copy_of, run
from torch import nn

import torch_cpudist as cpudist

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "row_wise_adagrad": lambda p: cpudist.optim.RowWiseAdagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "ftrl": lambda p: cpudist.optim.FTRL(p, lr=0.1),
}


def stepped(name, model):
    """A plain optimizer after one step on a dense gradient."""
    inner = OPTIMIZERS[name](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    inner.step()
    inner.zero_grad()
    return inner


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def table(rows=6, dim=2, sparse=True):
    return nn.Embedding(rows, dim, sparse=sparse)


def refused(inner, model, saved, match):
    """Loading is refused, and leaves the options and the servers as they are."""
    optimizer = wrapped(model, inner)
    options = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(cpudist.InvalidArgumentError, match=match):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == options
    assert all(float(s.get("step", 0)) == 0 for s in after["state"].values())


# ---- state of another model --------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "other", "name"),
    [
        (lambda: nn.Linear(100, 50), lambda: nn.Linear(1, 1), "weight"),
        (lambda: nn.Linear(2, 1), lambda: nn.Linear(3, 1), "weight"),
        (table, lambda: table(4, 3, sparse=False), "weight"),
    ],
)
@pytest.mark.parametrize("rule", ["sgd_momentum", "adagrad", "adam", "ftrl"])
def test_state_of_another_shape(mine, other, name, rule):
    def body():
        saved = stepped(rule, other()).state_dict()
        model = mine()
        shape = tuple(model.weight.shape)
        found = tuple(saved["state"][0][next(iter(saved["state"][0]))].shape)
        assert found != shape
        match = rf"'{name}': expected \w+ to be a tensor of shape \({shape[0]}, "
        inner = OPTIMIZERS[rule](model.parameters())
        refused(inner, model, saved, match)
        # torch itself takes any shape.
        inner = OPTIMIZERS[rule](model.parameters())
        inner.load_state_dict(saved)
        with pytest.raises(cpudist.InvalidArgumentError, match=match):
            wrapped(model, inner)

    alone(body)


def test_state_per_row_and_per_element_are_told_apart():
    def body():
        saved = stepped("row_wise_adagrad", table(sparse=False)).state_dict()
        model = table()
        inner = OPTIMIZERS["adagrad"](model.parameters())
        refused(inner, model, saved, r"expected sum .*\(6, 2\), found shape \(6,\)")

    alone(body)


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        (torch.ones(3, dtype=torch.int32), r"\(6,\), found shape \(3,\)"),
        (torch.full((6,), -1, dtype=torch.int32), "0 to 2"),
        (torch.full((6,), 2**31), "0 to 2"),
        ([1] * 6, "found list"),
    ],
)
def test_counts_of_rows_that_do_not_fit(counts, match):
    def body():
        model = table()
        inner = OPTIMIZERS["adam"](model.parameters())
        saved = stepped("adam", table(sparse=False)).state_dict()
        saved["state"][0]["cpudist_row_step"] = counts
        refused(inner, model, saved, f"cpudist_row_step .*{match}")

    alone(body)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("exp_avg", None, r"no \['exp_avg'\]"),
        ("step", None, r"no \['step'\]"),
        ("step", -1, "step to be a whole number"),
        ("step", float("nan"), "step to be a whole number"),
        ("step", torch.tensor([1.0, 2.0]), "step to be a whole number"),
        ("exp_avg", 3.0, "found float"),
        ("exp_avg", torch.ones(2, 3, dtype=torch.complex64), "real numbers"),
        ("max_exp_avg_sq", torch.ones(2, 3), r"also \['max_exp_avg_sq'\]"),
    ],
)
def test_state_that_is_not_whole(key, value, match):
    def body():
        model = linear()
        inner = OPTIMIZERS["adam"](model.parameters())
        saved = stepped("adam", linear()).state_dict()
        saved["state"][0][key] = value
        refused(inner, model, saved, match)

    alone(body)


# ---- state of another optimizer ----------------------------------------------------


@pytest.mark.parametrize("mine", OPTIMIZERS)
@pytest.mark.parametrize("other", OPTIMIZERS)
def test_state_of_another_optimizer(mine, other):
    def body():
        model = linear()
        inner = OPTIMIZERS[mine](model.parameters())
        saved = stepped(other, linear()).state_dict()
        if mine == other:
            wrapped(model, inner).load_state_dict(saved)
        else:
            refused(inner, model, saved, "expected|servers keep")

    alone(body)


def test_a_momentum_that_the_servers_do_not_keep():
    def body():
        model = linear()
        inner = OPTIMIZERS["sgd"](model.parameters())
        saved = stepped("sgd_momentum", linear()).state_dict()
        refused(inner, model, saved, r"keep sgd with state \[\].*momentum_buffer")

    alone(body)


@pytest.mark.parametrize(
    ("saved", "match"),
    [
        ({"foo": 1}, r"'state' and 'param_groups', found keys \['foo'\]"),
        ([], "found list"),
        (None, "found NoneType"),
        ({"optimizers": []}, "state of 0 optimizers, expected 1"),
        ({"optimizers": 3}, "state of 0 optimizers, expected 1"),
        ({"state": [], "param_groups": []}, "found list and list"),
        ({"state": {}, "param_groups": [{}]}, "a group without"),
        (
            {"state": {}, "param_groups": []},
            r"of \[2\] parameters, found groups of \[\]",
        ),
        ({"state": {}, "param_groups": [{"params": [0]}]}, r"found groups of \[1\]"),
        ({"state": {7: {}}, "param_groups": [{"params": [0, 1]}]}, r"others \[7\]"),
        ({"state": {}, "param_groups": [{"params": [0, 1]}]}, r"expected options"),
    ],
)
def test_what_is_no_state_dict(saved, match):
    def body():
        model = linear()
        refused(OPTIMIZERS["adam"](model.parameters()), model, saved, match)

    alone(body)


@pytest.mark.parametrize(("name", "value"), [("lr", "x"), ("betas", 3), ("lr", -1.0)])
def test_options_of_wrong_values(name, value):
    def body():
        model = linear()
        saved = stepped("adam", linear()).state_dict()
        saved["param_groups"][0][name] = value
        refused(OPTIMIZERS["adam"](model.parameters()), model, saved, "values that it")

    alone(body)


def test_a_refusal_of_the_last_optimizer_leaves_the_first_one():
    def body():
        model = linear()
        inners = [torch.optim.Adam([p], lr=0.1) for p in model.parameters()]
        optimizer = wrapped(model, inners)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["optimizers"][0]["param_groups"][0]["lr"] = 0.5
        del saved["optimizers"][1]["param_groups"][0]["betas"]
        with pytest.raises(cpudist.InvalidArgumentError, match="betas"):
            optimizer.load_state_dict(saved)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]

    alone(body)


def test_all_trainers_refuse_and_train_on():
    def body(context):
        model = linear()
        optimizer = wrapped(model, OPTIMIZERS["adam"](model.parameters()))
        with pytest.raises(cpudist.InvalidArgumentError, match="expected options"):
            optimizer.load_state_dict(stepped("adagrad", linear()).state_dict())
        step(model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer)
        return copy_of(model)

    first, second = run(body, 2)
    assert_same_bits(first, second)


def test_schedulers_keep_their_groups():
    def body():
        model = linear()
        inner = OPTIMIZERS["adam"](model.parameters())
        optimizer = wrapped(model, inner)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        saved = stepped("adam", linear()).state_dict()
        saved["param_groups"][0]["lr"] = 0.4
        optimizer.load_state_dict(saved)
        assert inner.param_groups[0]["lr"] == 0.4
        step(model, optimizer)
        scheduler.step()
        assert inner.param_groups[0]["lr"] == 0.2

    alone(body)


def test_a_converted_model_is_refused_before_anyone_waits():
    def body(context):
        model = linear()
        optimizer = wrapped(model, OPTIMIZERS["adam"](model.parameters()))
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 0.4
        model.double()
        with pytest.raises(cpudist.ModelChangedError, match="float64"):
            optimizer.store_model()
        with pytest.raises(cpudist.ModelChangedError, match="float64"):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.1

    run(body, 2)


def test_momentum_switched_off_is_dropped_when_wrapping_again():
    def body():
        model = linear()
        inner = OPTIMIZERS["sgd_momentum"](model.parameters())
        step(model, wrapped(model, inner))
        inner.param_groups[0]["momentum"] = 0.0
        optimizer = wrapped(model, inner)
        step(model, optimizer)
        assert all(not state for state in optimizer.state_dict()["state"].values())

    alone(body)


# ---- state that goes with the servers ----------------------------------------------


def warnings_of(caplog):
    return [r for r in caplog.records if "its state went with" in r.getMessage()]


@pytest.mark.parametrize("rule", ["adagrad", "sgd"])
@pytest.mark.parametrize("loaded", ["not", "inner"])
def test_state_lost_with_shutdown_is_told(rule, loaded, caplog):
    model = linear()
    inner = OPTIMIZERS[rule](model.parameters())

    def first():
        optimizer = wrapped(model, inner)
        step(model, optimizer)
        return optimizer.state_dict()

    def second():
        step(model, wrapped(model, inner))

    saved = alone(first)
    if loaded == "inner":
        inner.load_state_dict(saved)
    assert not warnings_of(caplog)
    alone(second)
    expected = int(rule == "adagrad" and loaded == "not")
    assert len(warnings_of(caplog)) == expected


def test_state_that_is_taken_over_is_not_lost(caplog):
    def body():
        model = linear()
        inner = OPTIMIZERS["adagrad"](model.parameters())
        for count in (1, 2, 3):
            optimizer = wrapped(model, inner)
            step(model, optimizer)
            state = optimizer.state_dict()["state"]
            assert float(state[0]["step"]) == count
        assert not warnings_of(caplog)

    alone(body)
