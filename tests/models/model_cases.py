# Copyright (c) 2026 The torch_cpudist authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Clicks to train other people's models on, and what every such test does with them.

A test gives a function that builds a model and one that trains it by the means of its
own package. The reference is the same model without this package: dense embeddings,
plain optimizer, the joined batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from remote_cases import remote_model, rows_now, static_model
from sync_cases import assert_same_bits, copy_of, largest_difference, run
from torch import nn

import torch_cpudist as cpudist
from torch_cpudist.launch.context import open_contexts
from torch_cpudist.tables.remote_weight import is_remote

USERS, ITEMS, DIM = 40, 60, 4
ROWS = {"user": USERS, "item": ITEMS}
# Every strategy here must learn every model.
LEARNING_STRATEGIES = ["sync", "async"]
DEBUG = {"CPUDIST_LOG": "debug"}


@dataclass(frozen=True)
class Clicks:
    """Samples with planted labels: ids int64, ``price`` and ``click`` float32, [n]."""

    user: np.ndarray
    item: np.ndarray
    price: np.ndarray
    click: np.ndarray

    def __len__(self) -> int:
        return len(self.click)

    def inputs(self) -> dict[str, np.ndarray]:
        """What a model sees, by feature."""
        return {"user": self.user, "item": self.item, "price": self.price}

    def part(self, rank: int, trainers: int, batch: int) -> Clicks:
        """What one trainer takes of every batch of ``trainers * batch`` samples."""

        def take(column: np.ndarray) -> np.ndarray:
            return column.reshape(-1, trainers, batch)[:, rank].reshape(-1)

        return Clicks(*map(take, (self.user, self.item, self.price, self.click)))


def clicks(samples: int, seed: int) -> Clicks:
    """Draws samples; the taste of users and the worth of items are always the same."""
    world = np.random.default_rng(0)
    taste, worth = world.normal(size=USERS), world.normal(size=ITEMS)
    draw = np.random.default_rng(seed)
    user, item = draw.integers(USERS, size=samples), draw.integers(ITEMS, size=samples)
    price = draw.random(samples)
    odds = 2 * taste[user] + 2 * worth[item] - 2 * (price - 0.5)
    click = draw.random(samples) < 1 / (1 + np.exp(-odds))
    return Clicks(user, item, price.astype(np.float32), click.astype(np.float32))


def auc(click: np.ndarray, score: Any) -> float:
    """Share of (clicked, not clicked) pairs in the right order; ties count half."""
    score = np.asarray(score, dtype=np.float64).reshape(-1)
    positive, negative = score[click > 0.5], score[click <= 0.5]
    differences = positive[:, None] - negative[None, :]
    return float(np.mean(np.sign(differences) + 1) / 2)


# Trains a model on samples in batches of a size, in their order. The optimizer is made
# by the third argument, for the model's parameters.
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Fit = Callable[[nn.Module, Clicks, int, MakeOptimizer], None]
Build = Callable[[], nn.Module]


def wrapped(make_optimizer: MakeOptimizer, strategy: Any) -> MakeOptimizer:
    """The same optimizer, by servers."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return cpudist.DistributedOptimizer(make_optimizer(model), model, strategy)

    return make


def flush(context: cpudist.Context) -> dict[str, float]:
    """Refreshes the rank's model; returns what its optimizer counted."""
    (optimizer,) = context.optimizers()
    optimizer.flush()
    return optimizer.stats()


def assert_equals_one_process(
    build: Build,
    fit: Fit,
    trainers: int,
    make_optimizer: MakeOptimizer,
    make_optimizer_alone: MakeOptimizer | None = None,
    batch: int = 16,
    steps: int = 12,
    min_rows: int = 10,
) -> None:
    """Colocated trainers under Sync against plain torch on the joined batches.

    ``make_optimizer_alone``: the reference's optimizer, where the loss asks for another
    learning rate on a larger batch. ``min_rows``: of ``shard_tables``.
    """
    samples = clicks(trainers * batch * steps, seed=1)
    alone = build()
    before = copy_of(alone)
    fit(alone, samples, trainers * batch, make_optimizer_alone or make_optimizer)
    expected = copy_of(alone)
    assert largest_difference(before, expected) > 1e-2
    # Built here: packages draw initial values from torch's global generator.
    models = [cpudist.shard_tables(build(), min_rows) for _ in range(trainers)]

    def body(context: cpudist.Context) -> tuple[dict[str, torch.Tensor], float]:
        rank = context.trainer_rank
        part = samples.part(rank, trainers, batch)
        fit(models[rank], part, batch, wrapped(make_optimizer, "sync"))
        stats = flush(context)
        return copy_of(models[rank]), stats["rows_pushed"]

    for state, rows_pushed in run(body, trainers):
        assert (rows_pushed > 0) == (min_rows < min(ROWS.values()))
        assert largest_difference(state, expected) <= 1e-6


def assert_learns(
    build: Build,
    fit: Fit,
    predict: Callable[[nn.Module, Clicks], Any],
    strategy: str,
    make_optimizer: MakeOptimizer,
    samples: int = 8192,
    batch: int = 64,
    remote: bool = False,
) -> None:
    """Two trainers on halves of the samples, two servers; AUC on samples of later."""
    training, later = clicks(samples, seed=2), clicks(1000, seed=3)
    if remote:  # nothing can be predicted before wrapping
        models = [remote_model(7, build) for _ in range(2)]
    else:
        models = [cpudist.shard_tables(build(), min_rows=10) for _ in range(2)]
        assert auc(later.click, predict(models[0], later)) < 0.65

    def body(context: cpudist.Context) -> float:
        rank = context.trainer_rank
        part = training.part(rank, 2, batch)
        fit(models[rank], part, batch, wrapped(make_optimizer, strategy))
        flush(context)
        return auc(later.click, predict(models[rank], later))

    for after in run(body, 2, 2):
        assert after > 0.8


def assert_foreseen(
    build: Build, fit: Fit, make_optimizer: MakeOptimizer, tables: int
) -> None:
    """One pull per forward after three, for all tables, and the bits of without."""
    batch, steps, watched = 32, 8, 3

    def trained(learn: bool) -> Any:
        model = cpudist.shard_tables(build(), 10)
        strategy = {"name": "sync", "communicator": {"learn_lookups": learn}}

        def body(context: cpudist.Context) -> Any:
            samples = clicks(batch * steps, seed=1)
            fit(model, samples, batch, wrapped(make_optimizer, strategy))
            (optimizer,) = context.optimizers()
            stats = optimizer.stats()
            optimizer.flush()
            return copy_of(model), stats["requests"], stats["lookups"]

        return run(body, 1, 1)[0]

    plain, requests, none = trained(False)
    found, fewer, lookups = trained(True)
    assert_same_bits(plain, found)
    assert none["together"] == 0
    assert lookups["tables"] == tables
    assert lookups["together"] == steps - watched
    assert lookups["in_vain"] == 0
    assert requests - fewer >= (steps - watched) * (tables - 1)


def assert_exported(
    build: Build,
    fit: Fit,
    predict: Callable[[Any, Clicks], np.ndarray],
    make_optimizer: MakeOptimizer,
    folder: Path,
) -> None:
    """The unmodified model, trained with remote tables, predicts so without servers."""
    samples, others = clicks(256, seed=1), clicks(512, seed=2)

    def body(context: cpudist.Context) -> np.ndarray:
        model = remote_model(make=build)

        def made(model: nn.Module) -> Any:
            opt = wrapped(make_optimizer, "sync")(model)
            opt.resume(folder / "snapshots")
            return opt

        fit(model, samples, 16, made)
        cpudist.export(model, folder / "out")
        return predict(model, others)

    expected = run(body, 1)[0]
    for model in (remote_model(seed=9, make=build), build()):
        with cpudist.load_for_inference(model, folder / "out"):
            np.testing.assert_allclose(predict(model, others), expected, atol=1e-6)
    assert np.ptp(expected) > 1e-3


def assert_remote_equals_static(
    build: Build,
    fit: Fit,
    trainers: int,
    make_optimizer: MakeOptimizer,
    batch: int = 16,
    steps: int = 12,
) -> None:
    """The unmodified model with remote tables against static ones that begin alike."""
    samples = clicks(trainers * batch * steps, seed=1)

    def train(models: list[nn.Module]) -> list[tuple[Any, Any]]:
        def body(context: cpudist.Context) -> tuple[Any, Any]:
            model = models[context.trainer_rank]
            part = samples.part(context.trainer_rank, trainers, batch)
            fit(model, part, batch, wrapped(make_optimizer, "sync"))
            (optimizer,) = context.optimizers()
            optimizer.flush("dense")
            tables = optimizer.trained.placement.tables
            weights = {id(table.found.weight) for table in tables}
            named = model.named_parameters()
            dense = {n: p.detach().clone() for n, p in named if id(p) not in weights}
            return rows_now(optimizer), dense

        return run(body, trainers, 2)

    models = [remote_model(7, build) for _ in range(trainers)]
    tables = sum(map(is_remote, models[0].parameters()))
    remote = train(models)
    static = train([static_model(7, build) for _ in range(trainers)])
    for (rows, dense), (static_rows, static_dense) in zip(remote, static, strict=True):
        assert rows.keys() == static_rows.keys()
        assert len(rows) == tables > 0
        assert dense.keys() == static_dense.keys()
        for name, value in {**static_rows, **static_dense}.items():
            assert torch.equal({**rows, **dense}[name], value), name


def rows_on_servers() -> list[int]:
    """Rows of tables that every server of this process's run holds."""
    found = [context.server for context in list(open_contexts)]
    return [server.stats()["rows"] for server in found if server is not None]


def placed(caplog: Any, fit: Fit, model: nn.Module, names: list[str]) -> None:
    """Checks the placement log and the servers: these are tables, all else is dense."""
    with caplog.at_level(logging.DEBUG, logger="torch_cpudist"):

        def body(context: cpudist.Context) -> list[int]:
            make = wrapped(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "sync")
            fit(model, clicks(256, seed=4), 64, make)
            return rows_on_servers()

        (rows,) = run(body, 1, 2, variables=DEBUG)
    lines = [r.getMessage() for r in caplog.records if r.name == "torch_cpudist"]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert len(rows) == 2
    assert min(rows) > 0
    assert sum(rows) == sum(shapes[name][0] for name in names)
    expected = [
        f"table {name}: {shapes[name][0]} rows, dim {shapes[name][1]}, "
        "by key over 2 servers"
        for name in names
    ]
    tables = [x for x in lines if x.startswith("table ") and "by key over" in x]
    assert sorted(tables) == sorted(expected)
    blocks = {x.split()[1].rstrip(":") for x in lines if x.startswith("block ")}
    assert blocks == shapes.keys() - set(names)
