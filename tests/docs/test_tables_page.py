# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs every block of docs/tables.md, and what README says of remote tables."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from loop_pages import DOCS, batches, blocks_of, names_of, run_block
from sync_cases import assert_same_bits, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.tables.remote_weight import is_remote, table_of

pytestmark = pytest.mark.usefixtures("in_a_folder")

TEXT = (DOCS / "tables.md").read_text()
BLOCKS = blocks_of(TEXT)
ROWS = 1_000_000


class DeepFM(nn.Module):
    """Of a name that the page has, and as many rows as it speaks of."""

    def __init__(self, *_, rows=ROWS):
        super().__init__()
        self.emb = nn.Embedding(rows, 4)
        self.score = nn.Linear(4, 1)
        for parameter in self.score.parameters():
            nn.init.constant_(parameter, 0.1)

    def forward(self, ids):
        return self.score(self.emb(ids).sum(1)).squeeze(1)


def execute(about, names, kind="two trainers"):
    return run_block(BLOCKS[kind, about], about, names)


def page_names(rank):
    return names_of(rank) | {"DeepFM": DeepFM, "nn": nn}


def test_every_block_is_tagged_and_run():
    assert TEXT.count("```python") == len(BLOCKS)
    two = ("build", "shard", "pretrained", "train", "open", "keys")
    one = ("admission", "eviction")
    assert set(BLOCKS) == {("two trainers", about) for about in two} | {
        ("one trainer", about) for about in one
    }


def test_built_and_trained():
    def body(context):
        names = execute("build", page_names(context.trainer_rank))
        assert names["opt"].strategy.name == "async"
        weight = names["model"].emb.weight
        assert is_remote(weight)
        assert weight.shape == (ROWS, 4)
        seen = torch.cat([ids for ids, _ in names["loader"]]).unique()
        begins = table_of(weight).program
        execute("train", names)
        assert names["scores"].shape == (8,)
        with torch.no_grad():
            names["model"](torch.arange(5000, 6000).view(-1, 4))
        context.barrier()
        held = sum(one["rows"] for one in context.server.table_stats())
        assert table_of(weight).program == begins
        dense = {k: v.clone() for k, v in names["model"].state_dict().items()}
        context.barrier()
        return seen, held, dense

    (seen, held, dense), (other, also_held, other_dense) = run(body, 2)
    assert list(dense) == ["score.weight", "score.bias"]
    assert_same_bits(dense, other_dense)
    # What was looked up for scores only, and the rest of a million, is nowhere.
    assert held + also_held == len(torch.cat([seen, other]).unique())


def test_both_ways_to_shard_a_model():
    lines = BLOCKS["two trainers", "shard"].splitlines()
    assert len(lines) == 2
    names = page_names(0)
    for number, line in enumerate(lines):
        names["model"] = DeepFM(rows=10_000)
        run_block(line, "shard", names)
        table = table_of(names["model"].emb.weight)
        assert (table.values is None) == (number == 1)
    assert table.program.steps == (("uniform", -0.01, 0.01),)


def test_pretrained_rows_are_stored_and_stay():
    vectors = torch.randn(600, 4, generator=torch.Generator().manual_seed(1))

    def body(context):
        names = page_names(context.trainer_rank)
        names["model"] = DeepFM(rows=600)
        # Trainer 0's count.
        names["vectors"] = vectors.clone() * (1 - context.trainer_rank)
        execute("pretrained", names)
        before = names["model"].score.weight.detach().clone()
        execute("train", names)
        assert not torch.equal(names["model"].score.weight, before)
        with torch.no_grad():
            return names["model"].emb(torch.arange(600)).clone()

    for rows in run(body, 2):
        assert torch.equal(rows, vectors)


def test_a_table_without_a_vocabulary_trains():
    def body(context):
        names = execute("open", page_names(context.trainer_rank))
        assert is_remote(names["model"].table.weight)
        execute("train", names)
        context.barrier()
        name = "table.weight"
        found = names["opt"].table_stats()[name] if not context.trainer_rank else None
        context.barrier()
        # A key counts once for each trainer and batch.
        return [set(ids.flatten().tolist()) for ids, _ in names["loader"]], found

    (mine, found), (others, _) = run(body, 2)
    pushes = Counter(key for batch in mine + others for key in batch)
    often = sum(count >= 3 for count in pushes.values())
    assert 0 < often < len(pushes)
    assert found["rows"] == found["created"] == often
    assert found["filtered"] == sum(min(count, 2) for count in pushes.values())


def test_keys_of_texts_and_numbers():
    names = execute("keys", page_names(0))
    users, cities = names["users"], names["cities"]
    assert users.dtype == cities.dtype == torch.int64
    assert users[0] == users[2] != users[1]
    assert cities[0] == cities[1] != cities[2]
    assert not torch.equal(cpudist.hash_keys(torch.tensor([3, 3, 250])), cities)


def test_a_key_gets_its_row_with_its_third_push():
    def body(context):
        return execute("admission", page_names(0), "one trainer")

    (names,) = run(body, 1)
    comment = re.search(r"rows (\d), created (\d), filtered (\d)", TEXT)
    for place, name in enumerate(("rows", "created", "filtered"), start=1):
        assert names["found"][name] == int(comment[place])
    assert names["rows"][:, 0].tolist() == [-2, 0, 0]


def test_rows_that_do_not_come_again_go():
    def body(context):
        return execute("eviction", page_names(0), "one trainer")

    (names,) = run(body, 1)
    comment = re.search(r"rows (\d) \(of key 2\), evicted (\d)", TEXT)
    assert names["found"]["rows"] == int(comment[1])
    assert names["found"]["evicted"] == int(comment[2])
    assert names["gone"] == {"weight": 0}


def test_what_readme_shows_builds_a_billion_rows():
    readme = (DOCS.parent / "README.md").read_text()
    (line,) = re.findall(r"`(with cpudist\.remote_tables\([^`]*:)`", readme)
    names = page_names(0)
    run_block(f"{line}\n    model = DeepFM(rows=1_000_000_000)", "readme", names)
    model = names["model"]
    assert is_remote(model.emb.weight)
    ids, _ = batches(0, 1)[0]

    def body(context):
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        wrapped = cpudist.DistributedOptimizer(optimizer, model)
        model(ids).sum().backward()
        wrapped.step()
        return sum(one["rows"] for one in context.server.table_stats())

    assert run(body, 1) == [len(ids.unique())]
