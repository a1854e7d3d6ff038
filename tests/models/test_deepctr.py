# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""deepctr-torch's DeepFM, trained by its own ``compile`` and ``fit``."""

from __future__ import annotations

import functools

import pytest
import torch
from deepctr_package import import_deepctr
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
    clicks,
    placed,
    wrapped,
)
from sync_cases import run

import torch_cpudist as cpudist

inputs = Lazily("deepctr_torch.inputs", import_deepctr)
models = Lazily("deepctr_torch.models", import_deepctr)

NO_L2 = {"l2_reg_embedding": 0, "l2_reg_linear": 0}
TABLES = [
    f"{part}embedding_dict.{feature}.weight"
    for part in ("", "linear_model.")
    for feature in ROWS
]


def build(**options):
    features = [inputs.SparseFeat(name, rows, DIM) for name, rows in ROWS.items()]
    features.append(inputs.DenseFeat("price", 1))
    # The package's default of 1e-4 would leave the network dead for all of a short run.
    scale = {"init_std": 0.1}
    return models.DeepFM(features, features, dnn_hidden_units=(8,), **scale, **options)


def fit(model, samples, batch, make_optimizer):
    model.compile(make_optimizer(model), "binary_crossentropy")
    inputs, labels = samples.inputs(), samples.click
    model.fit(inputs, labels, batch_size=batch, verbose=0, shuffle=False)


def predict(model, samples):
    return model.predict(samples.inputs())


def sgd(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


no_l2 = functools.partial(build, **NO_L2)


def test_one_trainer_equals_plain_torch():
    assert_equals_one_process(no_l2, fit, 1, adagrad)


def test_lookups_are_foreseen():
    assert_foreseen(no_l2, fit, adagrad, tables=4)


def test_two_trainers_equal_plain_torch():
    # fit() sums the loss over the batch and Sync averages over trainers: the learning
    # rate of the summed loss is the one process's times the number of trainers.
    assert_equals_one_process(
        no_l2,
        fit,
        2,
        functools.partial(sgd, lr=0.02),
        functools.partial(sgd, lr=0.01),
    )


@pytest.mark.parametrize("strategy", LEARNING_STRATEGIES)
def test_learns(strategy):
    assert_learns(no_l2, fit, predict, strategy, adagrad)


def test_the_log_shows_its_tables_on_the_servers(caplog):
    placed(caplog, fit, cpudist.shard_tables(no_l2(), min_rows=10), TABLES)


@pytest.mark.parametrize(
    ("options", "table"),
    [
        ({}, "embedding_dict.user.weight"),
        ({"l2_reg_linear": 0}, "embedding_dict.user.weight"),
        ({"l2_reg_embedding": 0}, "linear_model.embedding_dict.user.weight"),
    ],
    ids=["both", "embedding", "linear"],
)
def test_its_default_l2_is_refused_by_name(options, table):
    model = cpudist.shard_tables(build(**options), min_rows=10)

    def body(context):
        with pytest.raises(cpudist.DenseGradientError) as caught:
            fit(model, clicks(64, seed=5), 32, wrapped(adagrad, "sync"))
        (optimizer,) = context.optimizers()
        return str(caught.value), optimizer.rounds

    ((message, rounds),) = run(body, 1)
    assert message.startswith(f"table {table!r} has a dense gradient")
    assert "an L2 penalty over it. Take that out" in message
    assert "or set sparse=False on the embedding" in message
    assert rounds == 0


def test_its_default_l2_trains_what_stays_dense():
    assert_equals_one_process(build, fit, 1, adagrad, min_rows=1000)


# ---- its tables on servers only ------------------------------------------------------


def test_remote_tables_train_as_static_ones_to_the_bit():
    assert_remote_equals_static(no_l2, fit, 2, adagrad)


@pytest.mark.parametrize("strategy", LEARNING_STRATEGIES)
def test_learns_with_remote_tables(strategy):
    assert_learns(no_l2, fit, predict, strategy, adagrad, remote=True)


def test_it_predicts_without_servers_what_it_did_with_them(tmp_path):
    assert_exported(no_l2, fit, predict, adagrad, tmp_path)
