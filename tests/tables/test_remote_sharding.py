# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``shard_tables(remote=, initial=)``: models that are built become remote."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.remote_weight import is_remote, table_of

ROWS, DIM = 1_000_000_000, 16
NORMAL = cpudist.Normal()


def steps(module):
    return table_of(module.weight).program.steps


def overrides(module):
    return table_of(module.weight).program.overrides


def filled(rows=20, dim=3, **options):
    module = nn.Embedding(rows, dim, **options)
    with torch.no_grad():
        module.weight.copy_(torch.arange(rows * dim).reshape(rows, dim))
    return module


def test_filled_weights_become_remote_and_keep_their_values_until_stored():
    model = nn.ModuleDict({"a": filled(), "b": filled(5)})
    weight, values = model["a"].weight, model["a"].weight.detach().clone()
    lines = []
    made = cpudist.shard_tables(model, 10, lines.append, remote=True)
    assert made is model
    assert model["a"].weight is weight
    assert is_remote(weight)
    assert model["a"].sparse
    assert torch.equal(table_of(weight).values, values)
    assert not is_remote(model["b"].weight)
    assert lines == [
        "'a': table 'a.weight' of 20 rows on the servers, dim 3, stored when its "
        "optimizer is wrapped",
        "'b': stays dense: 5 rows are fewer than min_rows=10",
    ]


def test_patterns_choose_and_initial_replaces():
    model = nn.ModuleDict({"a": filled(padding_idx=2), "b": filled(5), "c": filled(7)})
    torch.manual_seed(2)
    cpudist.shard_tables(
        model,
        remote=["a", "b.weight"],
        initial={"a": cpudist.Normal(1, 2), "b*": cpudist.Constant(3)},
    )
    assert steps(model["a"]) == (("normal", 1, 2),)
    assert overrides(model["a"]) == ((2, 3, 0.0),)
    assert steps(model["b"]) == (("fill", 3, 0),)
    assert table_of(model["a"].weight).values is None
    assert not is_remote(model["c"].weight)
    cpudist.shard_tables(model, initial={"a": cpudist.Uniform(-1, 1)})
    assert steps(model["a"]) == (("uniform", -1, 1),)


def two():
    return nn.ModuleDict({"a": filled(), "b": filled()})


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (two, {"remote": ["a", "x"]}),
        (two, {"remote": ["a"], "initial": {"b": cpudist.Normal()}}),
        (two, {"remote": ["*"], "initial": {"a": cpudist.Normal(), "x": NORMAL}}),
        (two, {"remote": True, "min_rows": 10, "initial": {"*": NORMAL, "a": NORMAL}}),
        (
            lambda: nn.ModuleDict({"a": filled(), "b": filled(max_norm=1.0)}),
            {"remote": ["*"]},
        ),
        (
            lambda: nn.ModuleDict(
                {"a": filled(), "b": nn.Embedding(20, 3, device="meta")}
            ),
            {"remote": True, "min_rows": 10},
        ),
        (
            lambda: nn.ModuleDict(
                {"a": filled(), "b": nn.Embedding(2**59, 3, device="meta")}
            ),
            {"remote": True, "min_rows": 10, "initial": NORMAL},
        ),
    ],
)
def test_what_is_refused_has_changed_nothing(build, options):
    model = build()
    before = dict(model.named_parameters())
    state = torch.random.get_rng_state()
    lines = []
    with pytest.raises(cpudist.Error):
        cpudist.shard_tables(model, report=lines.append, **options)
    assert lines == []
    assert dict(model.named_parameters()) == before
    assert all(type(parameter) is nn.Parameter for parameter in before.values())
    assert not any(module.sparse for module in model.values())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_initialiser_that_others_come_before_is_named():
    model = nn.ModuleDict({"a": filled(), "b": filled()})
    broad_first = {"*": NORMAL, "a": cpudist.Uniform()}
    words = "initial of 'a' is never used: 'a.weight', which it fits, begins as '\\*'"
    with pytest.raises(cpudist.InvalidArgumentError, match=words):
        cpudist.shard_tables(model, 10, remote=True, initial=broad_first)
    narrow_first = {"a": cpudist.Uniform(), "*": NORMAL}
    cpudist.shard_tables(model, 10, remote=True, initial=narrow_first)
    assert [steps(model[name])[0][0] for name in "ab"] == ["uniform", "normal"]


def test_every_padding_row_of_a_shared_weight_is_zeros():
    model = nn.ModuleList([filled(padding_idx=index) for index in (None, 4, 2)])
    for module in model[1:]:
        module.weight = model[0].weight
    cpudist.shard_tables(model, 10, remote=True, initial=NORMAL)
    assert overrides(model[0]) == ((2, 3, 0.0), (4, 5, 0.0))


def test_frozen_weights_stay_or_are_refused_by_name():
    model = nn.ModuleDict(
        {"a": nn.Embedding.from_pretrained(torch.ones(20, 3)), "b": filled()}
    )
    lines = []
    cpudist.shard_tables(model, 10, lines.append, remote=True)
    assert lines[0].startswith("'a': stays as it is: its weight is frozen")
    assert not is_remote(model["a"].weight)
    assert is_remote(model["b"].weight)
    with pytest.raises(cpudist.UnsupportedModelError, match=r"frozen.*with lr=0"):
        cpudist.shard_tables(model, remote=["a"])


def test_weights_on_meta_need_an_initialiser():
    def build():
        return nn.Sequential(nn.Embedding(ROWS, DIM, device="meta"))

    with pytest.raises(cpudist.InvalidArgumentError, match="is on meta"):
        cpudist.shard_tables(build(), remote=True)
    model = cpudist.shard_tables(build(), remote=True, initial=cpudist.Uniform(0, 1))
    assert is_remote(model[0].weight)
    assert model[0].weight.device.type == "cpu"
    assert isinstance(model[0].weight, nn.Parameter)
    assert model.state_dict() == {}


def test_modules_of_one_weight_stay_modules_of_one_weight():
    for device in ("cpu", "meta"):
        model = nn.ModuleList([nn.Embedding(20, 3, device=device) for _ in range(2)])
        model[1].weight = model[0].weight
        cpudist.shard_tables(model, 10, remote=True, initial=cpudist.Normal())
        assert model[1].weight is model[0].weight
        assert all(module.sparse for module in model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remote": ["x*"]}, r"'x\*' is no remote table"),
        ({"remote": "a"}, "remote must be True"),
        ({"initial": cpudist.Normal()}, r"'\*' is no remote table"),
        ({"remote": ["a"], "initial": 3}, r"must be a cpudist\.Normal"),
        ({"remote": ["a"], "initial": {"b": cpudist.Normal()}}, "'b' is no remote"),
    ],
)
def test_what_is_asked_of_shard_tables_is_checked(options, message):
    with pytest.raises(cpudist.InvalidArgumentError, match=message):
        cpudist.shard_tables(nn.ModuleDict({"a": filled(), "b": filled()}), **options)


def test_what_cannot_be_remote_is_refused_by_name_and_told_of_otherwise():
    model = nn.ModuleDict({"a": filled(max_norm=1.0)})
    with pytest.raises(cpudist.UnsupportedModelError, match="max_norm"):
        cpudist.shard_tables(model, remote=["a"])
    lines = []
    cpudist.shard_tables(model, 10, lines.append, remote=True)
    assert lines[0].startswith("'a': stays dense: max_norm")
    tied = nn.ModuleDict({"a": filled(), "out": nn.Linear(3, 20)})
    tied["out"].weight = tied["a"].weight
    with pytest.raises(cpudist.UnsupportedModelError, match=r"tied to 'out\.weight'"):
        cpudist.shard_tables(tied, remote=["a"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: cpudist.Normal(std=-1),
        lambda: cpudist.Normal(mean=float("inf")),
        lambda: cpudist.Uniform(1, 0),
        lambda: cpudist.Uniform(low="a"),
        lambda: cpudist.Constant(float("nan")),
    ],
)
def test_initialisers_check_their_numbers(make):
    with pytest.raises(cpudist.InvalidArgumentError):
        make()
