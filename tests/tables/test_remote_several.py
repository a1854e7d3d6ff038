# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Remote tables of several models, and rows of them, before they are wrapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.remote_weight import is_remote, table_of


class Tower(nn.Module):
    """A table that is named, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(100, 4)
        self.place = nn.Embedding(8, 4)


def test_models_of_one_context_have_the_same_names() -> None:
    with cpudist.remote_tables(names=["user*"]):
        towers = [Tower(), Tower()]
    for tower in towers:
        assert is_remote(tower.user.weight)
        assert not is_remote(tower.place.weight)
        assert tower.place.weight.stride() == (4, 1)
        assert "place.weight" in tower.state_dict()


def test_a_context_inside_of_another_is_refused() -> None:
    with (
        cpudist.remote_tables(min_rows=50),
        pytest.raises(cpudist.InvalidArgumentError, match="one"),
        cpudist.remote_tables(names=["a"]),
    ):
        pass
    with cpudist.remote_tables(min_rows=50):
        assert is_remote(nn.Embedding(60, 2).weight)


def test_rows_take_constants_only() -> None:
    with cpudist.remote_tables(min_rows=1):
        one, other = nn.Embedding(100, 4), nn.Embedding(100, 4)
    nn.init.constant_(other.weight, 9.0)
    with torch.no_grad():
        for call in (
            lambda: one.weight[2:4].clone(),
            lambda: torch.empty_like(one.weight[2:4]),
            lambda: one.weight[0].copy_(one.weight[7]),
            lambda: one.weight[0:2].copy_(other.weight[0:2]),
        ):
            with pytest.raises(
                (cpudist.RemoteTableError, cpudist.UnsupportedModelError)
            ):
                call()


def test_functions_of_torch_initialise_as_methods_do() -> None:
    with cpudist.remote_tables(min_rows=1):
        table = nn.Embedding(100, 4)
    program = table_of(table.weight)
    with torch.no_grad():
        torch.fill_(table.weight, 3.0)
        torch.clamp_(table.weight, 0.0, 2.0)
        assert [step[0] for step in program.program.steps] == ["fill", "clamp"]
        torch.zero_(table.weight)
        assert [step[0] for step in program.program.steps] == ["fill"]
        table.weight[7, :] = 5.0
        assert program.program.overrides == ((7, 8, 5.0),)
        with pytest.raises(cpudist.UnsupportedModelError, match="div_"):
            table.weight.div_(0)
