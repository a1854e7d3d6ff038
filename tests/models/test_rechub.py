# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""torch-rechub's models, trained by its own ``CTRTrainer``."""

from __future__ import annotations

import tempfile

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
    clicks,
    placed,
    wrapped,
)
from sync_cases import run

import torch_cpudist as cpudist

basic = Lazily("torch_rechub.basic.features")
initializers = Lazily("torch_rechub.basic.initializers")
ranking = Lazily("torch_rechub.models.ranking")
trainers = Lazily("torch_rechub.trainers")


def features():
    # The package's default of 1e-4 would leave a short run near zero.
    start = initializers.RandomNormal(0, 0.1)
    sparse = [
        basic.SparseFeature(n, r, DIM, initializer=start) for n, r in ROWS.items()
    ]
    return sparse, [basic.DenseFeature("price")]


def autoint():
    """A model without batch norm, so that halves of a batch add up to the whole."""
    torch.manual_seed(1)
    return ranking.AutoInt(*features(), num_layers=2)


def deepfm():
    """Its layers between the tables and the click are normalised over the batch."""
    torch.manual_seed(1)
    sparse, dense = features()
    return ranking.DeepFM(sparse + dense, sparse, {"dims": [8], "activation": "relu"})


def loader(samples, batch):
    inputs = {k: torch.from_numpy(v) for k, v in samples.inputs().items()}
    click = torch.from_numpy(samples.click)
    return [
        ({k: v[i : i + batch] for k, v in inputs.items()}, click[i : i + batch])
        for i in range(0, len(samples), batch)
    ]


def fit(model, samples, batch, make_optimizer, **options):
    with tempfile.TemporaryDirectory() as folder:  # fit() saves the model
        trainer = trainers.CTRTrainer(
            model,
            optimizer_fn=lambda parameters, **_: make_optimizer(model),
            n_epoch=1,
            model_path=folder,
            **options,
        )
        trainer.fit(loader(samples, batch))


def predict(model, samples):
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainers.CTRTrainer(model, model_path=folder)
        return trainer.predict(model, loader(samples, 256))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("build", "make_optimizer"),
    # A bias before batch norm has a gradient of rounding errors only, which Adagrad
    # would turn into full steps.
    [(autoint, adagrad), (deepfm, sgd)],
)
def test_one_trainer_equals_plain_torch(build, make_optimizer):
    assert_equals_one_process(build, fit, 1, make_optimizer)


def test_lookups_are_foreseen():
    assert_foreseen(autoint, fit, sgd, tables=2)


def test_two_trainers_equal_plain_torch():
    assert_equals_one_process(autoint, fit, 2, sgd)


@pytest.mark.parametrize("build", [autoint, deepfm])
@pytest.mark.parametrize("strategy", LEARNING_STRATEGIES)
def test_learns(strategy, build):
    assert_learns(build, fit, predict, strategy, adagrad)


def test_the_log_shows_its_tables_on_the_servers(caplog):
    names = [f"sparse_embedding.embed_dict.{feature}.weight" for feature in ROWS]
    placed(caplog, fit, cpudist.shard_tables(autoint(), min_rows=10), names)


def test_its_embedding_l2_is_refused_by_name():
    penalty = {"regularization_params": {"embedding_l2": 1e-5}}
    model = cpudist.shard_tables(autoint(), min_rows=10)

    def body(context):
        with pytest.raises(cpudist.DenseGradientError) as caught:
            fit(model, clicks(64, seed=5), 32, wrapped(adagrad, "sync"), **penalty)
        return str(caught.value)

    (message,) = run(body, 1)
    assert message.startswith("table 'sparse_embedding.embed_dict.user.weight'")
    assert "an L2 penalty over it. Take that out" in message


def test_its_scheduler_reaches_the_servers():
    step = torch.optim.lr_scheduler.StepLR
    rates = {"scheduler_fn": step, "scheduler_params": {"step_size": 1, "gamma": 0.1}}

    def two_epochs(model, samples, batch, make_optimizer):
        trainer = trainers.CTRTrainer(
            model,
            optimizer_fn=lambda parameters, **_: make_optimizer(model),
            n_epoch=2,
            model_path=folder,
            **rates,
        )
        trainer.fit(loader(samples, batch))

    with tempfile.TemporaryDirectory() as folder:
        assert_equals_one_process(autoint, two_epochs, 1, sgd)


# ---- its tables on servers only ------------------------------------------------------


def test_remote_tables_train_as_static_ones_to_the_bit():
    assert_remote_equals_static(autoint, fit, 2, adagrad)


@pytest.mark.parametrize("strategy", LEARNING_STRATEGIES)
def test_learns_with_remote_tables(strategy):
    assert_learns(autoint, fit, predict, strategy, adagrad, remote=True)


def test_it_predicts_without_servers_what_it_did_with_them(tmp_path):
    assert_exported(autoint, fit, predict, adagrad, tmp_path)
