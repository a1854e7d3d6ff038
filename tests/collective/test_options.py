# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Options of optimizers are told as text, which is made only when one has changed."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.collective.options import Options


class Told(float):
    """A number that counts how often somebody asks for its text."""

    texts = 0

    def __repr__(self) -> str:
        Told.texts += 1
        return super().__repr__()


def optimizer() -> torch.optim.Optimizer:
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.2}]
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99))


def set_to(name: str, value: Any) -> Any:
    return lambda groups: groups[1].__setitem__(name, value)


CHANGES = {
    "number": set_to("lr", 0.3),
    "type": set_to("weight_decay", 1),
    "sign of zero": set_to("eps", -0.0),
    "pair": set_to("betas", (0.9, 0.98)),
    "kind of pair": set_to("betas", [0.9, 0.99]),
    "flag": set_to("maximize", True),
    "nothing": set_to("foreach", False),
    "tensor": set_to("lr", torch.tensor(0.2)),
    "tensors": set_to("betas", (torch.tensor(0.9), 0.99)),
    "class": set_to("initial_lr", object()),
    "gone": lambda groups: groups[0].pop("capturable"),
    "renamed": lambda groups: groups[0].__setitem__("other", groups[0].pop("eps")),
    "another group": lambda groups: groups.append(copy.deepcopy(groups[0])),
    "in another order": lambda groups: groups.reverse(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    opt = optimizer()
    opt.param_groups[1].update(weight_decay=True, eps=0.0)
    options = Options([opt])
    before = options.lines()
    assert options.lines() is before
    CHANGES[change](opt.param_groups)
    after = options.lines()
    assert after != before
    assert after == Options([opt]).lines()
    assert options.lines() is after


def test_values_that_change_in_place_are_seen() -> None:
    opt = optimizer()
    rate, pair = torch.tensor(0.1), [0.9, torch.tensor(0.99)]
    opt.param_groups[0].update(lr=rate, betas=pair)
    options = Options([opt])
    seen = [options.lines()]
    rate.mul_(0.5)
    seen.append(options.lines())
    rate.data = torch.tensor(0.7)
    seen.append(options.lines())
    pair[0] = 0.8
    seen.append(options.lines())
    pair[1].fill_(0.5)
    seen.append(options.lines())
    texts = ["\n".join(lines) for lines in seen]
    assert len(set(texts)) == len(texts)
    assert seen[-1] == Options([opt]).lines()


def test_lines_are_those_of_the_moment_after_any_changes() -> None:
    draw = random.Random(3)
    values: list[Any] = [0.0, -0.0, 1, 1.0, True, None, "a", (0.5, 1), (0.5, 1.0)]
    opt = optimizer()
    options = Options([opt])
    for _ in range(300):
        group = draw.choice(opt.param_groups)
        group[draw.choice(sorted(group)[:4])] = draw.choice(values)
        assert options.lines() == Options([opt]).lines()


def test_steps_make_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Told, "texts", 0)
    made = []

    def body(context: cpudist.Context) -> None:
        model = nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=Told(0.1))
        opt = cpudist.DistributedOptimizer(inner, model, "allreduce")
        for step in range(6):
            model(torch.ones(2, 3)).sum().backward()
            if step == 4:
                opt.param_groups[0]["lr"] = Told(0.2)
            opt.step()
            made.append(Told.texts)

    run(body, 1)
    assert made[0] == made[3]
    assert made[4] == made[5] == made[3] + 1
