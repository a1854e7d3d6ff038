# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models with tables of any key leave the cluster, and get newer rows there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from made_exports import USERS, write
from open_cases import DIM, KEYS, begun, counted, pushes, read, step, wrap
from snapshot_parity import seeing
from sync_cases import run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.exports.manifest import Manifest
from torch_cpudist.exports.reading import Export
from torch_cpudist.tables.remote_weight import table_of

ANY = replace(USERS, rows=2**54, overrides=((2**64 - 1, 0, 0.0),), open=True)


def net(seed: int = 1, **told) -> nn.ModuleDict:
    """A table of any key, looked up by two modules."""
    word = cpudist.Embedding(DIM, padding_key=-2, seed=seed, **told)
    bag = cpudist.EmbeddingBag(DIM, mode="sum")
    bag.weight = word.weight
    return nn.ModuleDict({"word": word, "bag": bag, "top": nn.Linear(DIM, 1)})


def seen(model) -> list[torch.Tensor]:
    """Of all keys, with rows and without."""
    with torch.no_grad():
        bags = model["bag"](torch.tensor(KEYS)[:, None]).clone()
    return [read(model["word"]), bags, model["top"].weight.detach().clone()]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("unknown", ["initial", "zeros"])
@pytest.mark.parametrize("servers", [1, 3])
def test_it_predicts_as_in_the_cluster(tmp_path, servers, unknown):
    told = {"unknown": unknown, "initial": cpudist.Uniform(1, 2)}

    def body(context):
        model = net(**told)
        opt = wrap(model)
        opt.resume(tmp_path / "snapshots")
        for push in pushes(3, 0, keys=10):
            step(opt, model["word"], push)
        cpudist.export(model, tmp_path / "out")
        return seen(model), counted("word.weight")["rows"]

    variables = seeing(tmp_path / "snapshots")
    ((expected, rows),) = run(body, 1, servers, variables=variables)
    assert 0 < rows < len(KEYS)
    assert bool((expected[0][-1] == 0).all()) == (unknown == "zeros")
    export = Export(tmp_path / "out")
    assert export.verify() == []
    assert export.manifest.tables[0].open
    model = net(seed=8, **told)
    with cpudist.load_for_inference(model, tmp_path / "out") as reader:
        assert_same(seen(model), expected)
        reader.verify()
        found = reader.look_up("word.weight", torch.tensor(KEYS))
        padding = torch.tensor(KEYS) == -2
        assert torch.equal(found[~padding], expected[0][~padding])


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_deltas_bring_and_take_rows(tmp_path, dtype):
    evict = cpudist.Evict(unseen_steps=2)

    def body(context):
        model = net(eviction=evict)
        opt = wrap(model)
        opt.resume(tmp_path / "snapshots")
        found = []
        for at, push in enumerate(pushes(5, 0, size=4)):
            step(opt, model["word"], push)
            base = tmp_path / str(at - 1) if at else None
            cpudist.export(model, tmp_path / str(at), dtype, base=base)
            found.append(seen(model))
        cpudist.export(model, tmp_path / "whole", dtype)
        return found, opt.table_stats()["word.weight"]

    variables = seeing(tmp_path / "snapshots")
    ((expected, stats),) = run(body, 1, 2, variables=variables)
    assert stats["evicted"] > 0
    gone = [f for f in Export(tmp_path / "4").manifest.files if "gone" in f.name]
    assert gone or any("gone" in f.name for f in Export(tmp_path / "3").manifest.files)
    whole = net(seed=5)
    cpudist.load_for_inference(whole, tmp_path / "whole")
    model = net(seed=6)
    with cpudist.load_for_inference(model, tmp_path / "0") as reader:
        for at in range(1, 5):
            assert reader.apply_delta(tmp_path / str(at)).deltas == at
            if dtype == "fp32":
                assert_same(seen(model), expected[at])
        assert_same(seen(model), seen(whole))
    chained = net(seed=7)
    with cpudist.load_for_inference(chained, tmp_path / "4"):
        assert_same(seen(chained), seen(whole))


def test_more_deltas_than_are_kept_apart_become_one(tmp_path):
    table = replace(ANY, name="word.weight", dim=DIM)
    rows: dict[int, list[float]] = {}
    base = None
    for at, key in enumerate(KEYS):
        rows[key] = [float(at)] * DIM
        if at > 2:
            del rows[KEYS[at - 2]]
        path = tmp_path / str(at)
        tensors = {"top.weight": torch.zeros(1, DIM), "top.bias": torch.zeros(1)}
        write(path, rows, tensors, base, table=table)
        base = path
    model = net(seed=3)
    with cpudist.load_for_inference(model, tmp_path / "0") as reader:
        for at in range(1, len(KEYS)):
            reader.apply_delta(tmp_path / str(at))
        found = reader.look_up("word.weight", torch.tensor(KEYS))
    there = [at for at, key in enumerate(KEYS) if key in rows]
    assert found[there].tolist() == [rows[KEYS[at]] for at in there]
    others = [key for key in KEYS if key not in rows]
    weight = net(seed=7)["word"].weight
    # The file's, which has another padding key.
    told = table_of(weight)
    told.program = replace(told.program, overrides=table.overrides)
    expected = torch.from_numpy(begun(weight, others, "word.weight"))
    absent = [at for at, key in enumerate(KEYS) if key not in rows]
    assert torch.equal(found[absent], expected)


def test_the_manifest_says_so_in_a_format_of_its_own(tmp_path):
    def fields(table):
        made = Manifest("0" * 32, "fp32", tables=(table,))
        path = tmp_path / ("open" if table.open else "closed")
        write(path, {1: [1.0] * 3}, {"a": torch.zeros(1)}, table=table)
        assert Export(path).manifest.tables == made.tables
        return json.loads((path / "manifest.json").read_text())

    opened, closed = fields(ANY), fields(USERS)
    assert (opened["format"], closed["format"]) == (2, 1)
    assert opened["tables"][0]["open"] is True
    assert "open" not in closed["tables"][0]


def test_keys_below_zero_are_damage_where_they_are_rows(tmp_path):
    tensors = {"a": torch.zeros(1)}
    write(tmp_path / "open", {-1: [1.0] * 3}, tensors, table=ANY)
    assert Export(tmp_path / "open").verify() == []
    write(tmp_path / "closed", {-1: [1.0] * 3}, tensors, table=USERS)
    (error,) = Export(tmp_path / "closed").verify()
    assert "keys outside of 0 to" in str(error)


def test_another_kind_of_table_is_another_model(tmp_path):
    tensors = {"top.weight": torch.zeros(1, DIM), "top.bias": torch.zeros(1)}
    closed = replace(USERS, name="word.weight", rows=2**54, dim=DIM, overrides=())
    write(tmp_path / "closed", {1: [1.0] * DIM}, tensors, table=closed)
    with pytest.raises(cpudist.SnapshotError, match="any key in the model only"):
        cpudist.load_for_inference(net(), tmp_path / "closed")
    opened = replace(ANY, name="word.weight", dim=DIM)
    write(tmp_path / "open", {1: [1.0] * DIM}, tensors, table=opened)
    model = net()
    with cpudist.remote_tables(min_rows=1):
        model["word"] = nn.Embedding(2**54, DIM)
    model["bag"].weight = model["word"].weight
    with pytest.raises(cpudist.SnapshotError, match="any key in it only"):
        cpudist.load_for_inference(model, tmp_path / "open")
