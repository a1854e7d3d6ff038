# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What becomes a table, what a dense block, and on which server each block lives."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import Counter

import pytest
import torch
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.model.placement import place
from torch_cpudist.rules.read import read_group
from torch_cpudist.settings.updates import Updates


def placed(model, servers=1, optimizer=None, **sharding):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    groups = optimizer.param_groups
    configs = [read_group(optimizer, group) for group in groups]
    return place(
        model, groups, configs, cpudist.Sharding(**sharding), servers, Updates()
    )


def blocks(placement):
    return [(b.name, b.offset, b.elements, b.shard) for b in placement.layout.blocks]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 4, sparse=True)
        self.bag = nn.EmbeddingBag(50, 3, sparse=True)
        self.small = nn.Embedding(5, 2)
        self.fc = nn.Linear(6, 8)


def test_tables_and_dense_parameters():
    placement = placed(Tower())
    tables = [(t.name, t.rows, t.dim) for t in placement.layout.tables]
    assert tables == [("words.weight", 100, 4), ("bag.weight", 50, 3)]
    assert [d.name for d in placement.dense] == [
        "small.weight",
        "fc.weight",
        "fc.bias",
    ]
    assert [d.index for d in placement.dense] == [0, 1, 2]


def test_a_shared_weight_is_one_table():
    model = nn.ModuleDict(
        {"query": nn.Embedding(9, 2, sparse=True), "item": nn.EmbeddingBag(9, 2)}
    )
    model["item"].sparse = True
    model["item"].weight = model["query"].weight
    placement = placed(model)
    assert [t.name for t in placement.layout.tables] == ["query.weight"]
    assert placement.tables[0].found.modules == [model["query"], model["item"]]
    assert placement.dense == []


def test_frozen_and_foreign_parameters_are_left_alone():
    model = Tower()
    model.words.weight.requires_grad_(False)
    model.fc.bias.requires_grad_(False)
    kept = [p for p in model.parameters() if p is not model.bag.weight]
    placement = placed(model, optimizer=torch.optim.SGD(kept, lr=0.1))
    assert placement.tables == []
    assert [d.name for d in placement.dense] == ["small.weight", "fc.weight"]


def test_every_parameter_knows_its_group():
    model = Tower()
    optimizer = torch.optim.SGD(
        [
            {"params": [model.fc.weight, model.words.weight], "lr": 0.5},
            {"params": [model.fc.bias, model.bag.weight], "lr": 0.25},
        ]
    )
    placement = placed(model, optimizer=optimizer)
    assert {t.found.name: t.group for t in placement.tables} == {
        "words.weight": 0,
        "bag.weight": 1,
    }
    assert {b.name: b.group for b in placement.layout.blocks} == {
        "fc.weight": 0,
        "fc.bias": 1,
    }
    assert [c.lr for c in placement.layout.configs] == [0.5, 0.25]


def test_a_parameter_outside_the_model_is_named_by_its_place():
    extra = nn.Parameter(torch.ones(3))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    names = [d.name for d in placed(model, optimizer=optimizer).dense]
    assert names == ["weight", "bias", "param_groups[0][2]"]


def test_blocks_are_whole_rows_and_cover_the_parameter():
    model = nn.Linear(7, 100, bias=False)
    placement = placed(model, servers=3, min_block_size=50)
    cut = placement.layout.blocks
    assert len(cut) == 3
    assert all(b.elements % 7 == 0 and b.row_width == 7 for b in cut)
    assert [b.offset for b in cut] == [0, cut[0].elements, 700 - cut[2].elements]
    assert sum(b.elements for b in cut) == 700
    assert [b.shard for b in cut] == [0, 1, 2]


def test_no_block_is_smaller_than_asked():
    model = nn.Linear(10, 30, bias=False)
    cut = placed(model, servers=3, min_block_size=150).layout.blocks
    assert [b.elements for b in cut] == [150, 150]
    cut = placed(model, servers=3, min_block_size=301).layout.blocks
    assert [b.elements for b in cut] == [300]


def test_without_slicing_parameters_stay_whole():
    model = nn.Linear(7, 100)
    found = blocks(placed(model, servers=3, slice=False, min_block_size=1))
    assert found == [("weight", 0, 700, 0), ("bias", 0, 100, 1)]


def test_round_robin_runs_on_across_parameters():
    model = nn.ParameterList([torch.ones(2) for _ in range(5)])
    shards = [b.shard for b in placed(model, servers=3).layout.blocks]
    assert shards == [0, 1, 2, 0, 1]


def test_balanced_deals_the_largest_first():
    model = nn.ParameterList([torch.ones(n) for n in (1, 10, 4, 3, 2)])
    found = placed(model, servers=2, split_method="balanced").layout.blocks
    loads = Counter()
    for block in found:
        loads[block.shard] += block.elements
    assert loads == {0: 10, 1: 10}
    assert [b.parameter for b in found] == [0, 1, 2, 3, 4]


HASHED = [2, 1, 1, 2, 2, 2, 2, 1, 3, 0, 2, 2]


def test_hash_depends_on_names_only():
    """What is written here was dealt by a process with another string hash seed."""
    model = nn.ModuleList([nn.Linear(3, 3) for _ in range(6)])
    found = placed(model, servers=4, split_method="hash").layout.blocks
    names = [f"{n}.{part}" for n in range(6) for part in ("weight", "bias")]
    assert [b.name for b in found] == names
    assert [b.shard for b in found] == HASHED


@pytest.mark.parametrize("method", ["round_robin", "hash", "balanced"])
def test_more_servers_than_parameters(method):
    found = placed(nn.Linear(3, 2), servers=20, split_method=method).layout.blocks
    assert [b.elements for b in found] == [6, 2]
    assert all(0 <= b.shard < 20 for b in found)


def test_scalars_and_empty_parameters():
    model = nn.ParameterDict({"scale": torch.tensor(2.0), "none": torch.empty(0, 3)})
    found = placed(model, servers=2)
    assert {d.name for d in found.dense} == {"scale"}
    assert [(b.name, b.elements, b.row_width) for b in found.layout.blocks] == [
        ("scale", 1, 1)
    ]


def test_float64_is_kept_and_other_types_are_refused():
    model = nn.Linear(2, 2, dtype=torch.float64)
    assert {b.dtype for b in placed(model).layout.blocks} == {"float64"}
    with pytest.raises(cpudist.UnsupportedModelError, match=r"weight.*bfloat16"):
        placed(nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.raises(cpudist.UnsupportedModelError, match=r"weight.*on meta"):
        placed(nn.Linear(2, 2, device="meta"))


def test_what_cannot_be_a_table_is_refused_with_the_reason():
    def refused(match, **changes):
        module = nn.Embedding(9, 2, sparse=True)
        for name, value in changes.items():
            setattr(module, name, value)
        with pytest.raises(cpudist.UnsupportedModelError, match=match):
            placed(nn.Sequential(module))

    refused("'0.weight' .*max_norm", max_norm=1.0)
    refused("freq.*Set scale_grad_by_freq=False", scale_grad_by_freq=True)
    refused(
        "float64.*or set sparse=False",
        weight=nn.Parameter(torch.ones(9, 2, dtype=torch.float64)),
    )
    refused("contiguous", weight=nn.Parameter(torch.ones(2, 9).t()))
    with pytest.raises(cpudist.UnsupportedModelError, match="mode='max'"):
        placed(nn.EmbeddingBag(9, 2, mode="max", sparse=True))
    model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Embedding(9, 2))
    model[1].weight = model[0].weight
    with pytest.raises(cpudist.UnsupportedModelError, match="sparse"):
        placed(model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_on_a_dense_embedding_too(kind):
    """torch would renormalise rows in forward, outside the optimizer."""
    model = nn.Sequential(kind(9, 2, max_norm=1.0), nn.Linear(2, 1))
    with pytest.raises(cpudist.UnsupportedModelError, match=r"'0'.*max_norm=None"):
        placed(model)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    assert len(placed(model, optimizer=optimizer).dense) == 2
    model[0].max_norm = None
    assert len(placed(model).dense) == 3


def test_a_lazy_module_that_has_not_run_is_refused():
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(cpudist.UnsupportedModelError, match=r"'0\.\w+'.*forward pass"):
        placed(model)
    model(torch.ones(1, 3))
    assert len(placed(model).dense) == 2


def test_a_large_dense_embedding_is_warned_of_once(caplog):
    model = nn.Sequential(nn.Embedding(9, 2), nn.Embedding(2_000_000, 3))
    with caplog.at_level(logging.WARNING, "torch_cpudist"):
        placed(model)
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1
    assert "'1'" in warnings[0]
    assert "23 MiB" in warnings[0]
    assert "shard_tables" in warnings[0]


def test_an_empty_parameter_is_left_alone():
    def body(context):
        model = nn.Module()
        model.empty = nn.Parameter(torch.zeros(0, 3))
        model.scalar = nn.Parameter(torch.tensor(1.0))
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = cpudist.DistributedOptimizer(inner, model)
        (model.scalar * 1.0 + model.empty.sum()).backward()
        optimizer.step()
        assert float(model.scalar) == 0.5

    run(body, 2)


@pytest.mark.parametrize("strategy", [None, cpudist.AllReduce()])
@pytest.mark.parametrize("kind", ["remote", "sparse", "dense", "parameter"])
def test_names_that_no_bytes_stand_for_are_refused(kind, strategy):
    model, name = nn.Module(), "a\ud800"
    with cpudist.remote_tables(min_rows=40):
        model.last = nn.Embedding(40, 2)
        if kind == "remote":
            setattr(model, name, nn.Embedding(40, 2))
    if kind == "sparse":
        setattr(model, name, nn.Embedding(40, 2, sparse=True))
    if kind == "dense":
        setattr(model, name, nn.Linear(2, 2))
    if kind == "parameter":
        model.register_parameter(name, nn.Parameter(torch.zeros(2)))

    def body(context):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(cpudist.UnsupportedModelError) as told:
            cpudist.DistributedOptimizer(optimizer, model, strategy)
        assert "parameter 'a\\ud800" in str(told.value)
        assert "another name" in str(told.value)

    run(body, 1)


def test_copies_of_what_has_a_name_without_bytes_can_be_saved():
    with cpudist.remote_tables(min_rows=40):
        model = nn.ModuleDict({"a\ud800": nn.Embedding(40, 2)})
    made = pickle.loads(pickle.dumps(copy.deepcopy(model)))  # noqa: S301
    assert list(made) == ["a\ud800"]
