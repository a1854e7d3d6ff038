# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Contexts of several models, rows of remote tables, and what is told to be static."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from patience import PATIENCE_S
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


def test_a_context_of_another_thread_disturbs_no_model_that_is_built() -> None:
    """torch fails where a hook comes or goes while it goes through them."""

    def another_context() -> None:
        with cpudist.remote_tables(min_rows=50):
            Tower()

    def meanwhile(module: nn.Module, name: str, parameter: object) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=another_context)
            thread.start()
            thread.join(PATIENCE_S)

    registers = torch.nn.modules.module
    hook = registers.register_module_parameter_registration_hook(meanwhile)
    try:
        tower = Tower()
        with cpudist.remote_tables(names=["user"]):
            remote = Tower()
    finally:
        hook.remove()
    assert not is_remote(tower.user.weight)
    assert is_remote(remote.user.weight)
    assert not is_remote(remote.place.weight)


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


# ---- what is not remote, and is told -------------------------------------------------


def remote(make, **options):
    with cpudist.remote_tables(**options):
        return make()


class OwnRows(nn.Module):
    """A lookup in a parameter of its own."""

    def __init__(self, rows):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(rows, 2))
        self.out = nn.Linear(2, rows)


def pair(other):
    return nn.ModuleDict({"a": nn.Embedding(60, 2), "it": other})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: nn.ModuleDict(
                {"small": nn.Embedding(9, 2), "bag": nn.EmbeddingBag(49, 2)}
            ),
            "largest embedding is 'bag.weight' with 49 rows: give a lower min_rows=, "
            "or names=['bag.weight'].",
        ),
        (lambda: None, "No module was built in the context: build the model in it"),
        (lambda: nn.Linear(60, 60), "No nn.Embedding or nn.EmbeddingBag was built"),
        (
            lambda: OwnRows(60),
            "Parameters of modules of your own are no tables ('rows'",
        ),
        (
            lambda: nn.Sequential(nn.Embedding(9, 2), OwnRows(60)),
            "are no tables ('1.rows'): hold such rows in an nn.Embedding",
        ),
    ],
)
def test_a_context_that_makes_nothing_remote_says_why(make, words, caplog):
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        remote(make, min_rows=50)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "remote_tables(min_rows=50): nothing is remote. "
    )
    assert words in record.getMessage()
    assert "out.weight" not in record.getMessage()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: nn.Embedding.from_pretrained(torch.ones(50, 2)), "from_pretrained"),
        (lambda: nn.EmbeddingBag(50, 2, _weight=torch.ones(50, 2)), "_weight="),
        (lambda: nn.utils.skip_init(nn.Embedding, 50, 2), "skip_init"),
        (lambda: nn.Embedding(50, 2, device="meta"), "it is on meta"),
    ],
)
def test_large_embeddings_that_stay_here_are_named(make, cause, alone, caplog):
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        remote(
            lambda: nn.ModuleDict({"it": make()}) if alone else pair(make()),
            min_rows=50,
        )
    (record,) = caplog.records
    told = record.getMessage()
    assert "embeddings of so many rows keep them on this trainer: 'it.weight'" in told
    assert cause in told
    assert "cpudist.shard_tables(model, remote=['it.weight'])" in told
    assert "'a.weight'" not in told


@pytest.mark.parametrize(
    "options", [{"min_rows": 50}, {"names": ["a"]}, {"names": ["a"], "min_rows": 100}]
)
def test_a_context_that_does_what_it_was_asked_for_says_nothing(options, caplog):
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        made = remote(lambda: pair(OwnRows(60)), **options)
    assert is_remote(made["a"].weight)
    assert caplog.text == ""


def test_the_way_out_of_a_large_embedding_is_one():
    made = remote(
        lambda: pair(nn.Embedding.from_pretrained(torch.ones(50, 2), freeze=False)),
        min_rows=50,
    )
    cpudist.shard_tables(made, remote=["it.weight"])
    assert is_remote(made["it"].weight)
