# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which embeddings are tables, and how lookups of all kinds bring their rows in."""

from __future__ import annotations

import copy

import pytest
import torch
from table_cases import (
    DIM,
    ROWS,
    alone,
    assert_trains_like_torch,
    bag,
    embedding,
    ids,
    weight_of,
    wrap,
)
from torch import nn

import torch_cpudist as cpudist

# ---- shard_tables ------------------------------------------------------------------


def test_shard_tables_marks_the_large_ones_and_says_so():
    model = nn.ModuleDict(
        {
            "large": nn.Embedding(100, 4),
            "bag": nn.EmbeddingBag(100, 2),
            "small": nn.Embedding(99, 4),
            "norm": nn.Embedding(100, 4, max_norm=1.0),
            "freq": nn.Embedding(100, 4, scale_grad_by_freq=True),
            "max": nn.EmbeddingBag(100, 4, mode="max"),
            "other": nn.Embedding(100, 4, dtype=torch.float64),
            "fc": nn.Linear(2, 2),
        }
    )
    said = []
    assert cpudist.shard_tables(model, min_rows=100, report=said.append) is model
    assert {name for name, m in model.items() if getattr(m, "sparse", False)} == {
        "large",
        "bag",
    }
    assert said == [
        "'large': table of 100 rows, dim 4",
        "'bag': table of 100 rows, dim 2",
        "'small': stays dense: 99 rows are fewer than min_rows=100",
        "'norm': stays dense: max_norm rewrites rows on the trainer during a lookup, "
        "outside the optimizer",
        "'freq': stays dense: torch has no sparse gradient with scale_grad_by_freq",
        "'max': stays dense: torch has no sparse gradient for mode='max'",
        "'other': stays dense: tables are float32, this is torch.float64",
    ]


def test_shard_tables_treats_modules_of_one_weight_alike():
    model = nn.ModuleList([nn.Embedding(100, 4), nn.EmbeddingBag(100, 4, mode="max")])
    model[1].weight = model[0].weight
    said = []
    cpudist.shard_tables(model, min_rows=10, report=said.append)
    assert not model[0].sparse
    assert said == [
        "'0', '1': stays dense: torch has no sparse gradient for mode='max'"
    ]
    model[1].mode = "sum"
    cpudist.shard_tables(model, min_rows=10)
    assert model[0].sparse
    assert model[1].sparse


def test_shard_tables_says_what_is_sparse_already():
    model = nn.ModuleDict(
        {
            "few": nn.Embedding(5, 2, sparse=True),
            "norm": nn.Embedding(100, 2, max_norm=1.0, sparse=True),
            "one": nn.Embedding(5, 2, sparse=True),
            "other": nn.EmbeddingBag(5, 2),
        }
    )
    model["other"].weight = model["one"].weight
    said = []
    cpudist.shard_tables(model, min_rows=10, report=said.append)
    assert all(module.sparse for module in model.values())
    assert said == [
        "'few': table of 5 rows, dim 2 (has sparse=True already)",
        "'norm': has sparse=True, which cannot train: max_norm rewrites rows on the "
        "trainer during a lookup, outside the optimizer",
        "'one', 'other': table of 5 rows, dim 2 (has sparse=True already)",
    ]


def test_shard_tables_leaves_a_weight_tied_to_another_module_dense():
    model = nn.ModuleDict(
        {"word": nn.Embedding(100, 4), "head": nn.Linear(4, 100, bias=False)}
    )
    model["head"].weight = model["word"].weight
    said = []
    cpudist.shard_tables(model, min_rows=10, report=said.append)
    assert not model["word"].sparse
    assert said == [
        "'word': stays dense: it is tied to 'head.weight', which gives it a dense "
        "gradient"
    ]


def test_shard_tables_leaves_a_computed_weight_alone():
    model = nn.Sequential(nn.Embedding(100, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    said = []
    cpudist.shard_tables(model, min_rows=10, report=said.append)
    assert not model[0].sparse
    assert said == ["'0': stays as it is: its weight is computed, not a parameter"]


def test_shard_tables_refuses_a_negative_limit():
    with pytest.raises(ValueError, match="min_rows must be >= 0, got -1"):
        cpudist.shard_tables(nn.Embedding(2, 2), min_rows=-1)


# ---- lookups -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding_of_any_shape(dtype):
    batches = [
        ids(1, 2, 2).to(dtype),
        ids([[3, 1], [0, 11]]).to(dtype),
        ids(5).reshape(()).to(dtype),
        ids([1, 3, 5, 7, 9, 11]).to(dtype)[0, ::2],
    ]
    assert_trains_like_torch(embedding, batches)


def test_an_empty_lookup():
    batches = [torch.empty(0, dtype=torch.int64), ids(1)]
    assert_trains_like_torch(embedding, batches)


def test_padding_idx_stays():
    batches = [ids([0, 4, 4], [2, 0, 1]), ids([0, 0, 0], [1, 1, 0])]
    assert_trains_like_torch(lambda: embedding(padding_idx=0), batches)
    assert_trains_like_torch(lambda: bag(padding_idx=0, mode="sum"), batches)
    assert_trains_like_torch(lambda: bag(padding_idx=4, mode="mean"), batches)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True])
def test_bags_with_offsets(mode, last):
    ends = [0, 2, 2, 5] if last else [0, 2, 2]
    batches = [(ids(1, 1, 7, 3, 9), ids(*ends)), (ids(9, 9, 9, 0, 2), ids(*ends))]
    assert_trains_like_torch(
        lambda: bag(mode=mode, include_last_offset=last),
        batches,
        lambda model, batch: model(batch[0], offsets=batch[1]),
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_a_matrix(mode):
    batches = [ids([1, 1, 2], [3, 4, 5]), ids([0, 1, 2], [11, 11, 11]).int()]
    assert_trains_like_torch(lambda: bag(mode=mode), batches)


def test_bags_with_weights_per_sample():
    weights = torch.tensor([[0.5, 2.0, -1.0], [1.0, 0.0, 3.0]])
    batches = [ids([1, 1, 2], [3, 4, 5]), ids([0, 1, 2], [2, 2, 3])]
    assert_trains_like_torch(
        lambda: bag(mode="sum"),
        batches,
        lambda model, batch: model(batch, per_sample_weights=weights),
    )


def test_keyword_arguments_work_as_before():
    def body():
        model = bag(mode="sum")
        plain = copy.deepcopy(model)
        wrap(model)
        ours = model(input=ids(1, 2, 3), offsets=ids(0, 2))
        assert torch.equal(ours, plain(input=ids(1, 2, 3), offsets=ids(0, 2)))

    alone(body)


class Pairs(nn.Module):
    """One weight behind two modules, and several lookups of one module per step."""

    def __init__(self):
        super().__init__()
        self.query = embedding()
        self.item = bag(mode="sum")
        self.item.weight = self.query.weight
        self.unused = embedding()
        self.fc = nn.Linear(DIM, 2)
        with torch.no_grad():
            self.fc.weight.fill_(0.3)
            self.fc.bias.fill_(0.1)

    def forward(self, batch):
        first, second = batch
        both = self.query(first) + self.query(second) * self.item(second[:, None])
        return self.fc(both)


def test_shared_tables_and_several_lookups_per_step():
    batches = [(ids(1, 2, 3), ids(3, 2, 7)), (ids(7, 7, 7), ids(7, 0, 1))]
    assert_trains_like_torch(Pairs, batches)


def test_accumulated_gradients():
    def forward(model, batch):
        model(batch[0]).square().sum().backward()
        return model(batch[1])

    batches = [(ids(1, 2), ids(2, 3)), (ids(3, 3), ids(3, 4))]
    assert_trains_like_torch(embedding, batches, forward)


def test_more_rows_than_a_chunk():
    rows = 70_000

    def make():
        return weight_of(nn.Embedding(rows, 1, sparse=True))

    assert_trains_like_torch(make, [ids(0, rows - 1), ids(65_535, 65_536, 3)])


def test_rows_are_read_in_eval_without_a_trace():
    def body():
        model = embedding()
        optimizer = wrap(model)
        model.eval()
        with torch.no_grad():
            first = model(ids(1, 2))
        optimizer.flush()
        assert torch.equal(first, model(ids(1, 2)))
        counts = optimizer.state_dict()["state"][0]["cpudist_row_step"]
        assert counts.tolist() == [0] * ROWS

    alone(body)
