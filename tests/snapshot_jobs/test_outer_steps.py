# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Outer steps of LocalSGD go on from what was loaded, parameter by parameter."""

from __future__ import annotations

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.snapshot.trainer_files import read_trainer

OUTER = cpudist.Outer(lr=0.7, momentum=0.5)


def local():
    return cpudist.LocalSGD(every=2, outer=OUTER)


class Parts(nn.Module):
    """Parameters of one shape, whose gradients are what they are told to be."""

    def __init__(self, **begin):
        super().__init__()
        for name, value in begin.items():
            setattr(self, name, nn.Parameter(torch.full((3,), float(value))))

    def forward(self, **gradients):
        return sum(
            (p * gradients.get(n, 0.0)).sum() for n, p in self.named_parameters()
        )


def wrapped(strategy, **begin):
    model = Parts(**begin)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    opt = cpudist.DistributedOptimizer(inner, model, strategy=strategy)

    def train(steps, **gradients):
        for _ in range(steps):
            opt.zero_grad()
            model(**gradients).backward()
            opt.step()

    return model, opt, train


def values(model):
    return {n: p.detach().tolist()[0] for n, p in model.named_parameters()}


def momenta(opt, name):
    """What outer steps keep of each parameter: saves it, and reads that."""
    opt.save_snapshot(name)
    directory = opt.snapshots.directory
    [trainer] = directory.manifest(name).trainers
    tree = read_trainer(directory.folder(name), trainer, directory.files)
    return {
        n: one.get("momentum_buffer", torch.zeros(3)).tolist()[0]
        for n, one in (tree["driver"]["progress"].get("outer") or {}).items()
    }


def saved(folder, strategy, steps=4):
    """Saves ``a`` near 10, which moves, and ``b`` at 100, which does not."""

    def body(_):
        model, opt, train = wrapped(strategy, a=10, b=100)
        opt.resume(folder)
        train(steps, a=0.25)
        if not isinstance(strategy, cpudist.LocalSGD):
            opt.save_snapshot("here")
            return values(model), {}
        return values(model), momenta(opt, "here")

    return run(body, 1)[0]


def test_they_go_with_the_names(tmp_path):
    """Whatever the order of parameters, and beside one that is new."""
    was, moved = saved(tmp_path / "old", local())
    assert moved["a"] != 0.0
    assert moved["b"] == 0.0

    def body(_):
        model, opt, train = wrapped(local(), new=7, a=1, b=1)
        opt.resume(tmp_path / "new")
        train(3, b=1.0, new=1.0)
        before = values(model)["new"]
        opt.load_snapshot(tmp_path / "old" / "here", map={"a": "b", "b": "a"})
        found = values(model)
        assert found == {"new": before, "a": was["b"], "b": was["a"]}
        kept = momenta(opt, "now")
        assert (kept["a"], kept["b"]) == (moved["b"], moved["a"])
        train(2)
        # No movement of these trainers: momentum alone goes on.
        after = values(model)
        assert after["a"] == was["b"]
        step = -OUTER.lr * OUTER.momentum * moved["a"]
        assert after["b"] == pytest.approx(was["a"] + step)

    run(body, 1)


def test_a_warm_start_of_some(tmp_path):
    was, moved = saved(tmp_path / "old", local())

    def body(_):
        model, opt, train = wrapped(local(), a=1, b=1)
        opt.resume(tmp_path / "new")
        train(5, b=1.0)  # in mid interval
        before, kept = values(model), momenta(opt, "before")
        opt.load_snapshot(tmp_path / "old" / "here", only=["a"])
        assert values(model) == {"a": was["a"], "b": before["b"]}
        assert momenta(opt, "now") == {"a": moved["a"], "b": kept["b"]}
        train(2)
        step = -OUTER.lr * OUTER.momentum
        expected = {
            "a": was["a"] + step * moved["a"],
            "b": before["b"] + step * kept["b"],
        }
        assert values(model) == pytest.approx(expected)

    run(body, 1)


def test_in_mid_interval_bit_for_bit(tmp_path):
    """Values of the last outer step are behind those that are saved, and come back."""

    def body(_):
        model, opt, train = wrapped(local(), a=10, b=100)
        started = opt.resume(tmp_path)
        assert (started.step, started.report) == (0, ())
        train(5, a=0.25, b=0.125)
        opt.save_snapshot("here")
        train(6, a=0.25)
        expected = values(model), momenta(opt, "first")
        assert opt.load_snapshot("here").step == 5
        train(6, a=0.25)
        assert (values(model), momenta(opt, "second")) == expected

    run(body, 1)


@pytest.mark.parametrize(
    "strategy", [cpudist.Sync, cpudist.AllReduce, lambda: cpudist.LocalSGD(every=2)]
)
def test_from_a_run_without_them(strategy, tmp_path):
    was, _ = saved(tmp_path, strategy())

    def body(_):
        model, opt, train = wrapped(local(), a=0, b=0)
        started = opt.resume(tmp_path)
        assert (started.step, values(model)) == (4, was)
        assert any("outer steps keep of 'a'" in line for line in started.report)
        train(4)
        assert values(model) == was  # nothing has moved
        opt.close()

    run(body, 1)


def test_another_rule_takes_values_alone(tmp_path):
    was, _ = saved(tmp_path / "old", local())

    def body(_):
        model = Parts(a=1, b=1)
        inner = torch.optim.Adam(model.parameters(), lr=0.5)
        opt = cpudist.DistributedOptimizer(inner, model, strategy=local())
        opt.resume(tmp_path / "new")
        for _ in range(4):
            opt.zero_grad()
            model(a=1.0).backward()
            opt.step()
        assert momenta(opt, "before")["a"] != 0.0
        opt.load_snapshot(tmp_path / "old" / "here")
        assert values(model) == was
        assert momenta(opt, "now") == {"a": 0.0, "b": 0.0}

    run(body, 1)
