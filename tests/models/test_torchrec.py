# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torchrec's DLRM over its unsharded ``EmbeddingBagCollection``."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from lazily import Lazily
from model_cases import (
    DIM,
    LEARNING_STRATEGIES,
    ROWS,
    assert_equals_one_process,
    assert_exported,
    assert_foreseen,
    assert_learns,
    assert_remote_equals_static,
    placed,
)
from sync_cases import run
from torch.nn.functional import binary_cross_entropy_with_logits

import torch_cpudist as cpudist

torchrec = Lazily("torchrec")
dlrm = Lazily("torchrec.models.dlrm")
modules = Lazily("torchrec.modules.fused_embedding_modules")


def build(**options):
    torch.manual_seed(1)
    collection = torchrec.EmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                name=f"table_{name}",
                embedding_dim=DIM,
                num_embeddings=rows,
                # One table, two features: bags of different lengths share its rows.
                feature_names=[name, f"last_{name}"] if name == "item" else [name],
            )
            for name, rows in ROWS.items()
        ],
    )
    return dlrm.DLRMTrain(dlrm.DLRM(collection, 1, [8, DIM], [8, 1]))


def batches(samples, size, weighted=False):
    """Bags of one id, and for ``last_item`` of none, one or two."""
    price, click = torch.from_numpy(samples.price), torch.from_numpy(samples.click)
    for i in range(0, len(samples), size):
        user, item = samples.user[i : i + size], samples.item[i : i + size]
        counts = item % 3
        last = np.repeat(item, counts)
        lengths = np.concatenate([np.ones(2 * len(user), dtype=np.int64), counts])
        ids = torchrec.KeyedJaggedTensor(
            keys=["user", "item", "last_item"],
            values=torch.from_numpy(np.concatenate([user, item, last])),
            lengths=torch.from_numpy(lengths),
            weights=torch.linspace(0.5, 1.5, lengths.sum()) if weighted else None,
        )
        yield price[i : i + size, None], ids, click[i : i + size]


class Batch:
    """What DLRMTrain takes: any object with these three."""

    def __init__(self, dense, sparse, labels):
        self.dense_features, self.sparse_features = dense, sparse
        self.labels = labels


def fit(model, samples, size, make_optimizer, **options):
    optimizer = make_optimizer(model)
    model.train()
    for parts in batches(samples, size, **options):
        optimizer.zero_grad()
        loss, _ = model(Batch(*parts))
        loss.backward()
        optimizer.step()


@torch.no_grad()
def predict(model, samples):
    model.eval()
    logits = [model(Batch(*parts))[1][1] for parts in batches(samples, 256)]
    return torch.cat(logits).numpy()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def test_one_trainer_equals_plain_torch():
    assert_equals_one_process(build, fit, 1, adagrad)


def test_lookups_are_foreseen():
    assert_foreseen(build, fit, adagrad, tables=2)


def test_two_trainers_equal_plain_torch():
    assert_equals_one_process(build, fit, 2, sgd)


def test_bags_with_weights():
    assert_equals_one_process(
        functools.partial(build, is_weighted=True),
        functools.partial(fit, weighted=True),
        1,
        adagrad,
    )


class Sequences(torch.nn.Module):
    """torchrec's collection without pooling, of bags of one id each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        config = torchrec.EmbeddingConfig(
            name="table_item",
            embedding_dim=DIM,
            num_embeddings=ROWS["item"],
            feature_names=["item"],
        )
        self.items = torchrec.EmbeddingCollection([config])
        self.last = torch.nn.Linear(DIM, 1)

    def forward(self, batch):
        rows = self.items(batch.sparse_features)["item"].values()
        logits = self.last(rows).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


def test_sequences():
    assert_equals_one_process(Sequences, fit, 2, sgd)


def test_fused_tables_are_refused():
    config = torchrec.EmbeddingBagConfig(
        name="table_item", embedding_dim=4, num_embeddings=10, feature_names=["item"]
    )
    fused = modules.FusedEmbeddingBagCollection([config], torch.optim.SGD, {"lr": 0.1})
    model = torch.nn.ModuleDict({"bags": fused})

    def body(context):
        found = "module 'bags' is a FusedEmbeddingBagCollection"
        with pytest.raises(cpudist.UnsupportedModelError, match=found):
            cpudist.DistributedOptimizer(adagrad(model), model)

    run(body, 1)


@pytest.mark.parametrize("strategy", LEARNING_STRATEGIES)
def test_learns(strategy):
    assert_learns(build, fit, predict, strategy, adagrad)


def test_the_log_shows_its_tables_on_the_servers(caplog):
    bags = "model.sparse_arch.embedding_bag_collection.embedding_bags"
    names = [f"{bags}.table_{name}.weight" for name in ROWS]
    placed(caplog, fit, cpudist.shard_tables(build(), min_rows=10), names)


# ---- its tables on servers only ------------------------------------------------------


def test_remote_tables_train_as_static_ones_to_the_bit():
    assert_remote_equals_static(build, fit, 2, adagrad)


@pytest.mark.parametrize("strategy", LEARNING_STRATEGIES)
def test_learns_with_remote_tables(strategy):
    assert_learns(build, fit, predict, strategy, adagrad, remote=True)


def test_sequences_with_remote_tables():
    assert_remote_equals_static(Sequences, fit, 2, sgd)


def test_it_predicts_without_servers_what_it_did_with_them(tmp_path):
    assert_exported(build, fit, predict, adagrad, tmp_path)
